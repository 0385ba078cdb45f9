"""Unknown fields of a body: fields that no request model declares, and fields without effect whose value is invalid.
--unknown-fields says whether unknown fields are refused, or dropped, counted and logged.

Clients add fields of their own to every object of a request, and new versions of clients add more, so the default is to
drop unknown fields. A field that changes the answer on other servers is not unknown: a model lists it in
`RequestModel.unsupported_fields`, and it is refused.
"""

from __future__ import annotations

import difflib
import logging
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from pydantic import BaseModel, ValidationInfo
from starlette.datastructures import Headers
from starlette.types import Scope

from moeserve.httpserver.transport.request_state import IGNORED_FIELDS, state_of

log = logging.getLogger(__name__)


MAX_LOGGED: Final = 1024  # fields that are logged, once each; clients could invent any number
MAX_NAMED: Final = 16  # fields named in one log line or header
MAX_NAME_CHARS: Final = 64
_PLAIN: Final = re.compile(r"[\w.\[\]-]+", re.ASCII)

Owner = type[BaseModel] | str  # the model whose object has the field, or the field's place in the body


class _Dropped(typing.NamedTuple):
    owner: Owner
    name: str
    is_known: bool  # True: a declared field without effect whose value was invalid


# The fields dropped from a body so far: pydantic's validation context.
Dropped = dict[_Dropped, None]


def drop_unknown(
    info: ValidationInfo, owner: Owner, names: Iterable[str], *, are_known: bool = False
) -> bool:
    """Records dropped fields of one object: unknown fields or, with are_known, fields without effect whose value is
    invalid. Returns False if the fields must be refused instead, because the validation has no context."""
    dropped: Dropped | None = info.context
    if dropped is None:
        return False
    for name in names:
        if len(dropped) < MAX_LOGGED:
            dropped.setdefault(_Dropped(owner, name, are_known))
    return True


HOSTED_TOOL: Final = "tools[].type="  # prefix of a dropped tool's name
# Prefixes of dropped parts of the history.
FOREIGN_ITEM: Final = "input[].type="
FOREIGN_BLOCK: Final = "messages[].content[].type="


class UnknownFields:
    """A server's policy for unknown fields, and the fields that it has logged."""

    def __init__(self, policy: str, count: Callable[[str, int], None]) -> None:
        """policy: --unknown-fields. count: called with a request's route and its number of unknown fields."""
        self._policy = policy
        self._count = count
        self._logged: set[str] = set()

    @contextmanager
    def dropped_from(self, model: type[BaseModel], scope: Scope) -> Iterator[Dropped | None]:
        """Yields the validation context that collects the fields dropped while a body is parsed as `model`."""
        if self._policy == "error":
            yield None
            return
        dropped: Dropped = {}
        yield dropped
        if dropped:
            self._tell(model, scope, [_Field.of(model, one) for one in dropped])

    def _tell(self, model: type[BaseModel], scope: Scope, fields: list[_Field]) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._count(route, len(fields))
        names = [field.name for field in fields]
        # A dropped tool or part of the history changes the answer, so it is named whatever the policy.
        always = (HOSTED_TOOL, FOREIGN_ITEM, FOREIGN_BLOCK)
        told = names if self._policy == "warn" else [name for name in names if name.startswith(always)]
        if told:
            state_of(scope).notes[IGNORED_FIELDS] = ", ".join(told[:MAX_NAMED])
        if self._policy == "warn":
            log.warning("%s: ignored %s%s", route, _listed(names), _client(scope))
            return
        for field in fields:
            key = f"{route} {field.name}"
            if key in self._logged or len(self._logged) >= MAX_LOGGED:
                continue
            self._logged.add(key)
            log.warning("%s: ignored %s%s", route, field.told, _client(scope))


class _Field(typing.NamedTuple):
    name: str  # the field with its place in the body; printable
    told: str  # the name in the log

    @classmethod
    def of(cls, model: type[BaseModel], dropped: _Dropped) -> _Field:
        owner, name, is_known = dropped
        place = owner if isinstance(owner, str) else _places(model).get(owner, "")
        shown = name[:MAX_NAME_CHARS]
        if not _PLAIN.fullmatch(shown):
            shown = re.sub(r"[^\w.-]", "?", shown, flags=re.ASCII)
        full = place + shown
        if is_known:
            return cls(full, f"the value of {full}, which cannot be read and would have no effect")
        known = [] if isinstance(owner, str) else list(owner.model_fields)
        near = difflib.get_close_matches(shown, known, 1, 0.8)
        hint = f" (did the client mean {near[0]}?)" if near else ""
        return cls(full, f"the unknown field {full}{hint}")


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _client(scope: Scope) -> str:
    """Returns the client, for a log line."""
    agent = Headers(scope=scope).get("user-agent", "")
    return f", sent by {agent[:100]!r}" if agent else ""


@cache
def _places(model: type[BaseModel]) -> dict[type[BaseModel], str]:
    """Returns the place of each model's objects in a body, such as "messages[].tool_calls[]."."""
    places: dict[type[BaseModel], str] = {model: ""}
    todo = [model]
    while todo:
        outer = todo.pop()
        for name, info in outer.model_fields.items():
            for inner, suffix in _models_in(info.annotation):
                if inner not in places:
                    places[inner] = f"{places[outer]}{info.alias or name}{suffix}."
                    todo.append(inner)
    return places


def _models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    is_list = typing.get_origin(annotation) is list
    for part in typing.get_args(annotation):
        for model, suffix in _models_in(part):
            yield model, ("[]" if is_list else "") + suffix

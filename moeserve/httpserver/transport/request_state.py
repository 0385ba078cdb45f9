"""RequestState: facts about one HTTP request that the connection and the middleware share, kept in the request's
scope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Scope

from moeserve.messages.refusal import Refusal

IGNORED_FIELDS: Final = "x-moeserve-ignored-fields"
RELAXED_SCHEMAS: Final = "x-moeserve-relaxed-schemas"
_KEY: Final = "moeserve_request"  # in the scope's state


@dataclass(slots=True)
class RequestState:
    request_id: str = ""
    # Name of the request's API key; "" without keys. The router gets the name, never the key.
    tenant: str = ""
    key_owner: str = ""  # owner of the data that it stores: `ApiKeys.owner_of`
    # Headers for the answer, such as the one that names ignored fields; values are visible ASCII and blanks.
    notes: dict[str, str] = field(default_factory=dict)
    refusal: Refusal | None = None  # the first reason why the request was refused
    # Called when the request reaches the engine: `Turns.admit`.
    admit: Callable[[], None] = lambda: None
    is_background: bool = False  # a line of an offline batch


def state_of(scope: Scope) -> RequestState:
    state: RequestState = scope.setdefault("state", {}).setdefault(_KEY, RequestState())
    return state

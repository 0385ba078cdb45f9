"""Finds out which parts of a conversation a chat template shows: renders conversations with a marked text in each role
and place, and looks for the marks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from moeserve.httpserver.generation.chat.template_shape import Conversation, Shapes, TemplateShape
from moeserve.tokenizer.errors import TemplateError, TemplateTimeout

_ROLES: Final = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
_DESCRIPTION: Final = "Looks a text up."
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": _DESCRIPTION,
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
Tools = list[dict[str, Any]] | None
# Renders a conversation with tools, in a shape. Raises TemplateError.
Render = Callable[[Conversation, Tools, TemplateShape], str]


@dataclass(frozen=True, slots=True)
class _Repair:
    """A change to conversations that a template would not show completely.

    `places` lists such conversations, one letter a message: S system, U user, A assistant, T tool; C is an assistant
    with one call, P with two (c and p: with a text beside them); B is a call whose arguments are no object; N is a call
    without an id."""

    what: str  # what the template does not show, for the log
    places: str
    how: str
    options: tuple[Mapping[str, Any], ...]  # fields of TemplateShape; the first set that helps is taken


# The order matters: a repair relies on the repairs before it.
_REPAIRS: Final = (
    _Repair("messages of users in a row", "UUAU UAUU", "are joined", ({"joins_users": True},)),
    _Repair("messages of assistants in a row", "UAAU", "are joined", ({"joins_assistants": True},)),
    _Repair(
        "an assistant's message before a user's",
        "AU AUAU",
        "follows an empty one",
        ({"begins_with_user": True},),
    ),
    _Repair("system messages", "SU SUAU", "are shown as a user's", ({"systems": "dropped"},)),
    _Repair("a second system message", "SSU SSSUAU", "is joined to the first", ({"joins_systems": True},)),
    _Repair("calls", "UCTU UCTAU", "are shown as text", ({"writes_calls": True},)),
    _Repair("calls without ids", "UNTU UNT", "get ids", ({"gives_ids": True},)),
    _Repair("arguments that are not an object", "UBTU UBT", "are shown as one", ({"needs_objects": True},)),
    _Repair("several calls at once", "UPTTU", "are shown one after another", ({"splits_calls": True},)),
    _Repair(
        "text beside a call",
        "UcT UcTAU SUcTAU UpTTAU",
        "is a message before it",
        ({"texts_before_calls": "answered"}, {"texts_before_calls": "all"}),
    ),
    _Repair("a tool's result without its call", "UTU TU UATU", "is shown as a user's", ({"moves_lone_results": True},)),
    _Repair(
        "a system message behind others",
        "SUASU UASU USU SUS SUAUS SUCTSU UCST",
        "is shown as a user's",
        ({"moves_late_systems": True},),
    ),
    _Repair("a conversation without a user", "S SA SAS", "gets one", ({"asks_for_user": True},)),
)  # fmt: skip


def shapes_of(render: Render) -> tuple[Shapes, list[str]]:
    """Returns the shapes in which the template shows conversations completely, and the names of the parts that it would
    leave out or refuse, for the log. If the template fails on the simplest conversation, the shapes change nothing."""
    try:
        plain, found = _shape(render, None)
        with_tools, found_with_tools = _shape(render, [_TOOL])
    except TemplateTimeout as error:
        return Shapes(), [f"{error}, so that it is not known"]
    return Shapes(plain, with_tools), [*dict.fromkeys(found + found_with_tools)]


def fails_without_description(render: Render, shape: TemplateShape) -> bool:
    """Returns whether the template renders tools only if each has a description."""

    def fails(tool: dict[str, Any]) -> bool:
        try:
            render([{"role": "user", "content": "Hi"}], [tool], shape)
        except TemplateError:
            return True
        return False

    function = {name: value for name, value in _TOOL["function"].items() if name != "description"}
    return fails({**_TOOL, "function": function}) and not fails(_TOOL)


def _shape(render: Render, tools: Tools) -> tuple[TemplateShape, list[str]]:
    def missed(shape: TemplateShape, places: str) -> set[str]:
        def is_shown(place: str) -> bool:
            return _is_shown(place, lambda c: render(c, tools, shape), wanted)

        return {place for place in places.split() if not is_shown(place)}

    wanted = ""
    shape, found = TemplateShape(), list[str]()
    if missed(shape, "U"):
        return shape, found
    if tools:
        wanted = _DESCRIPTION
        if missed(shape, "U"):  # the template shows no tools
            wanted = ""
    for repair in _REPAIRS:
        before = missed(shape, repair.places)
        if not before:
            continue
        options = [replace(shape, **option) for option in repair.options]
        left = [len(missed(option, repair.places)) for option in options]
        if min(left) == len(before):
            found.append(f"{repair.what} (left out or refused)")
            continue
        shape = options[left.index(min(left))]
        found.append(f"{repair.what} ({repair.how}{' where that helps' if min(left) else ''})")
    return shape, found


def _is_shown(place: str, render: Callable[[Conversation], str], wanted: str) -> bool:
    """Returns whether the template shows all texts of a marked conversation for `place`, and the text
    `wanted`, which the template adds."""
    marks = _Marks()
    conversation = [*marks.conversation(place)]
    try:
        text = render(conversation)
    except TemplateTimeout:
        raise
    except TemplateError:
        return False
    return wanted in text and all(mark in text for mark in marks.given)


class _Marks:
    """Texts that no template contains by itself. They are single words, because no template changes a word."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def conversation(self, place: str) -> Iterator[dict[str, Any]]:
        calls: list[Mapping[str, Any]] = []
        for letter in place:
            if letter in "CcPpBN":
                calls = [self._call(letter == "B") for _ in range(2 if letter in "Pp" else 1)]
                if letter == "N":
                    calls = [{name: value for name, value in one.items() if name != "id"} for one in calls]
                text = self._mark() if letter.islower() else ""
                yield {"role": "assistant", "content": text, "tool_calls": [*calls]}
                continue
            message = {"role": _ROLES[letter], "content": self._mark()}
            if letter == "T":
                call_id = calls.pop(0).get("id") if calls else "call_0123456789abcdef"
                message |= {"name": _TOOL["function"]["name"]} | (
                    {"tool_call_id": call_id} if call_id else {}
                )
            yield message

    def _call(self, is_cut_off: bool = False) -> dict[str, Any]:
        text = self._mark()
        function = {
            "name": _TOOL["function"]["name"],
            "arguments": f'{{"text": "{text}' if is_cut_off else {"text": text},
        }
        return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}

    def _mark(self) -> str:
        mark = f"mark{secrets.token_hex(8)}"
        self.given.append(mark)
        return mark

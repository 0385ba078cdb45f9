"""Answers as a model writes them, read by the parsers of its format."""

from __future__ import annotations

from typing import Any, Final

from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.chatformat.harmony import HarmonyParser
from moeserve.chatformat.output import AnswerParser, OutputParser, joined
from moeserve.chatformat.reasoning import ReasoningParser
from tests.support.chats.chat_events import Answer
from tests.support.chats.chat_families import tags_of
from tests.support.chats.family_templates import TEMPLATES, rendered, rendered_in_channels

STRING: Final = {"type": "string"}
SCHEMAS: Final[dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "a": STRING,
            "b": STRING,
            "n": {"type": "integer"},
            "refs": {"type": "array", "items": STRING},
            "opts": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
NAMES: Final = [*TEMPLATES, "harmony"]


def parser_of(name: str, *, is_open: bool = False, offered: tuple[str, ...] = ("f", "now")) -> AnswerParser:
    if name == "harmony":
        return HarmonyParser("<|start|>assistant", reads_calls=True, offered=offered)
    thought = ReasoningParser(is_open, tags_of(name))
    tools = TOOL_FORMATS[name]
    return OutputParser(thought, tools.parser(SCHEMAS), offered, bare=tools.bare_calls(offered))


def read(name: str, text: str, *, ended_by: str | None = "", **options: Any) -> Answer:
    """Reads the text whole and in pieces, as an answer that the model itself has ended."""

    def answer(*pieces: str) -> Answer:
        parser = parser_of(name, **options)
        events = [event for piece in pieces for event in parser.push(piece)]
        return Answer.of(joined([*events, *parser.finish(ended_by)]))

    whole = answer(text)
    assert answer(*text) == whole
    for at in (len(text) // 3, 2 * len(text) // 3):
        assert answer(text[:at], text[at:]) == whole
    return whole


def call(name: str, arguments: dict[str, Any], content: str = "") -> str:
    """Returns a call of `f` as its format has it."""
    if name == "harmony":
        return rendered_in_channels(content, [("f", arguments)])
    return rendered(name, content, [("f", arguments)])

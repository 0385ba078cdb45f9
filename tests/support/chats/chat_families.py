"""Answers in the form of each family of chat formats."""

from __future__ import annotations

from typing import Any

from moeserve.chatformat import solar_open
from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.chatformat.harmony import HarmonyParser
from moeserve.chatformat.kimi_k3 import KimiK3Parser
from moeserve.chatformat.output import AnswerParser, OutputParser
from moeserve.chatformat.reasoning import QWEN3, REASONING_TAGS, ReasoningParser, ReasoningTags
from tests.support.chats.chat_events import Make
from tests.support.chats.family_templates import rendered, rendered_in_channels
from tests.support.chats.kimi_k3_template import rendered_in_sections
from tests.support.chats.solar_template import rendered_in_messages

SCHEMAS: dict[str, Any] = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "count": {"type": "integer"},
            "exact": {"type": "boolean"},
            "filters": {"$ref": "#/$defs/filters"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"filters": {"allOf": [{"type": "object"}]}},
    }
}


REASONING = "Hm.\n\nWell, <b>"


def tags_of(name: str) -> ReasoningTags:
    return REASONING_TAGS.get(name, QWEN3)


def make_for(name: str, schemas: dict[str, Any] = SCHEMAS, is_open: bool = False) -> Make:
    def make() -> AnswerParser:
        if name == "harmony":
            return HarmonyParser("<|start|>assistant", reads_calls=True)
        if name == "kimi_k3":
            return KimiK3Parser("", reads_calls=True, schemas=schemas)
        if name == "solar_open":
            return solar_open.parser("<|begin|>assistant", reads_calls=True, offered=schemas)
        return OutputParser(ReasoningParser(is_open, tags_of(name)), TOOL_FORMATS[name].parser(schemas))

    return make


def answer_in(name: str, thought: str, content: str, calls: list[tuple[str, Any]]) -> str:
    if name == "kimi_k3":
        return rendered_in_sections(thought, content, calls)
    if name == "solar_open":
        return rendered_in_messages(thought, content, calls)
    if name != "harmony":
        tags = tags_of(name)
        return (f"{tags.open}\n{thought}{tags.ending}" if thought else "") + rendered(name, content, calls)
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return analysis + rendered_in_channels(content, calls)

"""Phi-4-mini's published template: what it is given beside tools and without them."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from moeserve.chatformat.formats import TOOL_FORMATS, tool_format
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.tokenizer.chat_template import ChatTemplate
from tests.support.chats.written_answers import read

# As it is published, in small: roles, texts, and the tools that a system message has.
PHI4: Final = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'system' and message['tools'] %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"
    "{% endif %}<|end|>{% endfor %}<|assistant|>"
)
FUNCTIONS: Final = [{"name": "f", "description": "D.", "parameters": {"type": "object"}}]
WRAPPED: Final = [{"type": "function", "function": one} for one in FUNCTIONS]
CALLS: Final = [("f", {"a": "x", "b": "<|end of it"}), ("now", {})]
TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in CALLS],
    },
    {"role": "tool", "content": "12 degrees", "tool_call_id": "1"},
]


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_phi_4_minis_published_template_gets_the_tools_and_calls_as_text(system: str) -> None:
    assert tool_format(PHI4) is TOOL_FORMATS["phi4_mini"]
    formats = ChatFormats(tools=TOOL_FORMATS["phi4_mini"])
    first = [{"role": "system", "content": system}] if system else []
    messages, _ = formats.for_template([*first, *TURNS], WRAPPED, PHI4)
    text = ChatTemplate(PHI4, {}).render(messages)
    given = text.partition("<|tool|>")[2].partition("<|/tool|>")[0]
    assert json.loads(given) == FUNCTIONS
    assert text.startswith(f"<|system|>{system or 'You are a helpful assistant with some tools.'}<|tool|>")
    assert text.endswith("<|end|><|tool_response|>12 degrees<|end|><|assistant|>")
    written = text.partition("<|user|>Hi<|end|><|assistant|>")[2].partition("<|end|><|tool_response|>")[0]
    assert read("phi4_mini", written).calls == CALLS
    assert read("phi4_mini", written).text == "Let me see."


def test_phi_4_minis_published_template_without_tools() -> None:
    formats = ChatFormats(tools=TOOL_FORMATS["phi4_mini"])
    assert formats.for_template(TURNS[:1], None, PHI4) == (TURNS[:1], None)
    messages, _ = formats.for_template(TURNS, None, PHI4)
    assert "<|tool_call|>" in ChatTemplate(PHI4, {}).render(messages), "calls of an earlier turn stay"

"""What models of some families are told of tools and of thinking, and the ids of their calls."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.thinking_tokens import template_effort
from moeserve.httpserver.generation.request.thinking import ThinkingOptions
from moeserve.tokenizer.chat_template import ChatTemplate
from tests.support.chats.deepseek_templates import DEEPSEEK_V31
from tests.support.chats.family_templates import KIMI, TEMPLATES
from tests.support.chats.scripted_answers import MESSAGES, PARIS, TOOLS

TOOLS_FOR_TEMPLATE = [
    {"type": "function", "function": {"parameters": {"type": "object"}} | tool["function"]} for tool in TOOLS
]


def test_kimis_ids_name_the_tool_and_count_the_calls() -> None:
    formats = ChatFormats(tools=TOOL_FORMATS["kimi_k2"])

    def call(name: str, call_id: str | None) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": PARIS}}

    def result(call_id: str | None, text: str) -> dict[str, Any]:
        return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id})

    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call("weather", "a"), call("now", "b")]},
        result("b", "Noon."),
        result("a", "Rain."),
        {"role": "assistant", "content": "", "tool_calls": [call("weather", None)]},
        result(None, "Sun."),
    ]
    adapted, _ = formats.for_template(messages, TOOLS_FOR_TEMPLATE, KIMI)
    prompt = ChatTemplate(KIMI, {}).render(adapted, tools=TOOLS_FOR_TEMPLATE)
    begins = [
        part.partition("<|tool_call_argument_begin|>")[0] for part in prompt.split("<|tool_call_begin|>")[1:]
    ]
    assert begins == ["functions.weather:0", "functions.now:1", "functions.weather:2"]
    for number, text in (("now:1", "Noon."), ("weather:0", "Rain."), ("weather:2", "Sun.")):
        assert f"## Return of functions.{number}\n{text}" in prompt


@pytest.mark.parametrize("name", ["mistral", "mistral_json"])
def test_mistrals_ids_are_nine_digits(name: str) -> None:
    formats, template = ChatFormats(tools=TOOL_FORMATS[name]), TEMPLATES[name]
    call = {"id": "call_0f", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call, call | {"id": "call_1f"}]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "call_1f"},
    ]
    adapted, _ = formats.for_template(messages, TOOLS_FOR_TEMPLATE, template)
    assert [one["id"] for one in adapted[-2]["tool_calls"]] == ["000000000", "000000001"]
    assert adapted[-1]["tool_call_id"] == "000000001"


def test_tools_that_the_template_leaves_out_are_in_the_system_message() -> None:
    formats = ChatFormats(tools=TOOL_FORMATS["deepseek_v31"])
    silent = DEEPSEEK_V31.partition("{%- for m in messages %}")[2]
    system = {"role": "system", "content": "Be brief."}
    (first, question), _ = formats.for_template([system, *MESSAGES], TOOLS_FOR_TEMPLATE, silent)
    assert question == MESSAGES[0]
    assert first["content"].startswith("Be brief.\n\n## Tools\n")
    assert '### weather\nDescription: Of a city.\n\nParameters: {"type": "object"' in first["content"]
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>" in first["content"]
    (alone, _), _ = formats.for_template(MESSAGES, TOOLS_FOR_TEMPLATE, silent)
    assert alone["content"] == first["content"].removeprefix("Be brief.\n\n")
    assert formats.for_template(MESSAGES, None, silent) == (MESSAGES, None)
    assert formats.for_template(MESSAGES, TOOLS_FOR_TEMPLATE, DEEPSEEK_V31)[0] == MESSAGES


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        (ThinkingOptions(), None),
        (ThinkingOptions(is_enabled=True), None),
        (ThinkingOptions(is_enabled=False), "low"),
        (ThinkingOptions(budget=1024), "low"),
        (ThinkingOptions(budget=1025), "medium"),
        (ThinkingOptions(budget=5000), "high"),
        (ThinkingOptions(effort="medium", budget=4096), "medium"),
        (ThinkingOptions(effort="xhigh"), "high"),
    ],
)
def test_the_word_for_the_template(options: ThinkingOptions, effort: str | None) -> None:
    assert template_effort(options) == effort

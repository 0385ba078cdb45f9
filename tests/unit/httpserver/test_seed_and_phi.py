"""Seed-OSS and Phi-4-mini through the chat API: their tags as control tokens, and what their templates want."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from moeserve.chatformat.formats import TOOL_FORMATS, tool_format
from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.tokenizer.chat_template import ChatTemplate
from tests.support.family_server import serving
from tests.support.http_harness import NAME, HttpServer, say
from tests.support.scripted_answers import MESSAGES, PARIS, TOOLS, prompt_of
from tests.support.written_answers import read

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


def ask(server: HttpServer, **fields: Any) -> dict[str, Any]:
    server.requests.clear()
    response = server.post("/v1/chat/completions", {"model": NAME, "messages": MESSAGES} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


seed = serving("seed_oss")
phi = serving("phi4_mini")


def called(answer: dict[str, Any]) -> tuple[str, Any]:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def test_seed_oss_thinks_and_calls(seed: HttpServer) -> None:
    call = "\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
    seed.answer = say(
        "<seed:think>", "Hm.", "</seed:think>", "Let me.\n", "<seed:tool_call>", call, "</seed:tool_call>"
    )
    answer = ask(seed, tools=TOOLS)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Let me.", "Hm.")
    assert called(answer) == ("weather", PARIS)


def test_seed_oss_budget_of_thinking_is_its_templates(seed: HttpServer) -> None:
    seed.answer = say("Hi")
    closed = "<seed:think></seed:think>"
    ask(seed)
    assert closed not in prompt_of(seed)
    for switched_off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        ask(seed, **switched_off)
        assert closed in prompt_of(seed)
    ask(seed, chat_template_kwargs={"enable_thinking": False, "thinking_budget": 512})
    assert closed not in prompt_of(seed)


def test_phi_4_mini_calls_between_control_tokens(phi: HttpServer) -> None:
    call = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    phi.answer = say("<|tool_call|>", call, "<|/tool_call|>")
    assert called(ask(phi, tools=TOOLS)) == ("weather", PARIS)
    phi.answer = say("<|tool_call|>", call)  # models leave out the last tag
    assert called(ask(phi, tools=TOOLS)) == ("weather", PARIS)


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

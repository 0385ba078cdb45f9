"""Seed-OSS and Phi-4-mini through the chat API: their tags are control tokens."""

from __future__ import annotations

import json
from typing import Any

from tests.support.chats.scripted_answers import PARIS, TOOLS, ask, prompt_of
from tests.support.servers.family_server import serving
from tests.support.servers.http_harness import HttpServer, say

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

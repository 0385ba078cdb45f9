"""Kimi-K3's answers, whose tags are words between control tokens, through the chat API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chats.kimi_k3_template import rendered_in_sections
from tests.support.chats.scripted_answers import MESSAGES, PARIS, TOOLS, ask, prompt_of
from tests.support.servers.family_server import serving
from tests.support.servers.http_harness import HttpServer, say

BEGUN = '<|open|>message role="assistant"<|sep|>'
THINK, RESPONSE = "<|open|>think<|sep|>", "<|open|>response<|sep|>"
END = "<|close|>message<|sep|>"

kimi = serving("kimi_k3")


def answered(thought: str, content: str, *calls: tuple[str, Any]) -> str:
    """Returns an answer from the end of the tag that the prompt has begun."""
    return rendered_in_sections(thought, content, [*calls]).partition("<|sep|>")[2]


def test_reasoning_text_and_calls_come_from_their_sections(kimi: HttpServer) -> None:
    kimi.answer = say(
        "Let me", " see.<|close|>think", f"<|sep|>{RESPONSE}Hi", " you<|close|>response<|sep|>", END
    )
    answer = ask(kimi)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi you", "Let me see.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    request = kimi.requests[-1]
    words = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    tokens = {word: kimi.tokenizer.encode(word)[0] for word in words}
    assert set(tokens.values()) == set(request.text.shown_tokens)
    assert tokens["<|end_of_msg|>"] in request.sampling.stop_token_ids
    assert not request.sampling.grammar
    assert prompt_of(kimi).endswith(BEGUN + THINK)

    text = answered("Hm", "", ("weather", PARIS))
    kimi.answer = say(text[:40], text[40:90], text[90:])
    choice = ask(kimi, tools=TOOLS)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == PARIS
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Hm", "tool_calls")
    together = ask(kimi, tools=TOOLS, separate_reasoning=False)["choices"][0]["message"]
    assert together["content"] == "Hm"
    assert together["tool_calls"]


def test_an_answer_sent_back_is_the_prompts_beginning(kimi: HttpServer) -> None:
    """The next prompt begins with this prompt and answer, so that the cached prefix still matches."""
    text = answered("Hm.", "Let me see.", ("weather", PARIS), ("now", {}))
    kimi.answer = say(text)
    message = ask(kimi, tools=TOOLS)["choices"][0]["message"]
    prompt = prompt_of(kimi)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "Sun."}
        for call in message["tool_calls"]
    ]
    ask(kimi, messages=[*MESSAGES, message, *results], tools=TOOLS)
    assert prompt_of(kimi).startswith(prompt + text + "<|end_of_msg|>")
    assert prompt_of(kimi).endswith(BEGUN + THINK)


@pytest.mark.parametrize(
    ("asked", "effort", "begun"),
    [
        ({}, "max", THINK),
        ({"reasoning_effort": "low"}, "low", THINK),
        ({"reasoning_effort": "medium"}, "high", THINK),
        ({"reasoning_effort": "xhigh"}, "max", THINK),
        ({"thinking_token_budget": 800}, "low", THINK),
        ({"chat_template_kwargs": {"thinking_effort": "high"}}, "high", THINK),
        ({"reasoning_effort": "none"}, "", RESPONSE),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "", RESPONSE),
        ({"chat_template_kwargs": {"thinking": False}}, "", RESPONSE),
        ({"chat_template_kwargs": {"enable_thinking": False, "thinking": True}}, "max", THINK),
    ],
)
def test_effort_and_switches_are_the_templates(
    kimi: HttpServer, asked: dict[str, Any], effort: str, begun: str
) -> None:
    kimi.answer = say(f"Hm<|close|>think<|sep|>{RESPONSE}Hi" if begun == THINK else "Hi")
    message = ask(kimi, **asked)["choices"][0]["message"]
    assert message["content"] == "Hi"
    assert prompt_of(kimi).endswith(BEGUN + begun)
    assert (f"Effort: {effort}." in prompt_of(kimi)) == bool(effort)
    grammar = kimi.requests[-1].sampling.grammar
    assert ("max_tokens=800" in grammar) == ("thinking_token_budget" in asked)


def test_grammars_hold_the_sections(kimi: HttpServer) -> None:
    kimi.answer = say(answered("Hm", "", ("weather", PARIS)))
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        message = ask(kimi, tools=TOOLS, tool_choice=choice)["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        grammar = kimi.requests[-1].sampling.grammar
        assert "weather" in grammar
        assert "tools?" not in grammar
        assert ("now" in grammar) == (choice == "required")
    ask(kimi, tools=TOOLS, parallel_tool_calls=False)
    assert "weather" in kimi.requests[-1].sampling.grammar
    assert "call+" not in kimi.requests[-1].sampling.grammar
    ask(kimi, tools=TOOLS, tool_choice="none")
    assert "weather" not in kimi.requests[-1].sampling.grammar
    assert kimi.requests[-1].sampling.grammar

    kimi.answer = say(f"Hm<|close|>think<|sep|>{RESPONSE}12<|close|>response<|sep|>{END}")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    assert ask(kimi, response_format=schema)["choices"][0]["message"]["content"] == "12"
    assert "@answer" in kimi.requests[-1].sampling.grammar
    ask(kimi, response_format=schema, tools=TOOLS)
    assert "weather" in kimi.requests[-1].sampling.grammar


def test_a_begun_answer_goes_on(kimi: HttpServer) -> None:
    kimi.answer = say(f" jumps<|close|>response<|sep|>{END}")
    begun = [*MESSAGES, {"role": "assistant", "content": "The dog", "reasoning_content": "Hm."}]
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    assert ask(kimi, messages=begun, **asked)["choices"][0]["message"]["content"] == " jumps"
    assert prompt_of(kimi).endswith(f"{RESPONSE}The dog")

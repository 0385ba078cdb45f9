"""Solar Open's answers, whose reasoning, text and calls are messages, through the chat API."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any, Final

import pytest

from moeserve.chatformat import solar_open
from moeserve.messages.reasoning import Thinking, is_open_after
from tests.support.chats.scripted_answers import MESSAGES, PARIS, TOOLS, ask, prompt_of
from tests.support.chats.solar_template import SOLAR, rendered_in_messages
from tests.support.models.family_vocabulary import write_family_model
from tests.support.servers.family_server import serving
from tests.support.servers.http_harness import HttpServer, http_server, say

BEGUN: Final = "<|begin|>assistant"
NO_REASONING: Final = f"{BEGUN}<|think|><|end|>{BEGUN}"

solar = serving("solar_open")


def test_reasoning_text_and_calls_come_from_their_messages(solar: HttpServer) -> None:
    solar.answer = say("<|think|>Let me", f" see.<|end|>{BEGUN}", "<|content|>Hi", " you")
    answer = ask(solar)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi you", "Let me see.")
    request = solar.requests[-1]
    tokens = {word: solar.tokenizer.encode(word)[0] for word in solar_open.WORDS}
    assert set(tokens.values()) == set(request.text.shown_tokens)
    assert {tokens["<|flush|>"], tokens["<|calls|>"]} <= set(request.sampling.stop_token_ids)
    assert tokens["<|end|>"] not in request.sampling.stop_token_ids
    assert prompt_of(solar).endswith(BEGUN)

    text = rendered_in_messages("Hm", "", [("weather", PARIS)])
    solar.answer = say(text[:40], text[40:90], text[90:])
    choice = ask(solar, tools=TOOLS)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == PARIS
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Hm", "tool_calls")


def test_a_turn_that_ends_within_the_reasoning_goes_on_with_an_answer(solar: HttpServer) -> None:
    solar.answer = say("<|content|>Hi")
    ask(solar)
    early = solar.requests[-1].early_end
    assert early is not None
    assert isinstance(early.reasoning, Thinking)
    assert solar.tokenizer.decode(early.reasoning.ending, skip_special=False) == solar_open.ANSWER_FOLLOWS
    for text, is_open in (("<|think|>Hm", True), ("<|content|>Hi", False), ("<|think|>Hm<|end|>", False)):
        output = array("i", solar.tokenizer.encode(text))
        assert is_open_after(early.reasoning, output) == is_open


def test_the_history_is_what_the_model_writes(solar: HttpServer) -> None:
    """Except for the ids of calls, which the model makes up: the prompt counts them."""
    text = rendered_in_messages("Hm.", "Let me see.", [("weather", PARIS), ("now", {})])
    solar.answer = say(text)
    message = ask(solar, tools=TOOLS)["choices"][0]["message"]
    prompt = prompt_of(solar)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "Sun."}
        for call in message["tool_calls"]
    ]
    ask(solar, messages=[*MESSAGES, message, *results], tools=TOOLS)
    assert prompt_of(solar).startswith(f"{prompt}{text}<|calls|>")
    assert "<|tool_response:begin|>call000001<|tool_response:result|>Sun." in prompt_of(solar)


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "medium"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking_token_budget": 800}, True),
    ],
)
def test_efforts_are_the_templates(solar: HttpServer, asked: dict[str, Any], thinks: bool) -> None:
    solar.answer = say("<|content|>Hi")
    assert ask(solar, **asked)["choices"][0]["message"]["content"] == "Hi"
    assert prompt_of(solar).endswith(NO_REASONING) != thinks
    grammar = solar.requests[-1].sampling.grammar
    assert ("max_tokens=800" in grammar) == ("thinking_token_budget" in asked)


def test_grammars_hold_the_messages(solar: HttpServer) -> None:
    solar.answer = say(rendered_in_messages("Hm", "", [("weather", PARIS)]))
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        message = ask(solar, tools=TOOLS, tool_choice=choice)["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        grammar = solar.requests[-1].sampling.grammar
        assert "weather" in grammar
        assert "(final | calls)" not in grammar
        assert ("now" in grammar) == (choice == "required")
    ask(solar, tools=TOOLS, parallel_tool_calls=False)
    assert "call+" not in solar.requests[-1].sampling.grammar
    ask(solar, tools=TOOLS, tool_choice="none")
    assert "weather" not in solar.requests[-1].sampling.grammar
    assert solar.requests[-1].sampling.grammar

    solar.answer = say(f"<|think|>Hm<|end|>{BEGUN}<|content|>12")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    assert ask(solar, response_format=schema)["choices"][0]["message"]["content"] == "12"
    assert "@answer" in solar.requests[-1].sampling.grammar


def test_a_begun_answer_goes_on(solar: HttpServer) -> None:
    solar.answer = say(" jumps")
    begun = [*MESSAGES, {"role": "assistant", "content": "The dog", "reasoning_content": "Hm."}]
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    assert ask(solar, messages=begun, **asked)["choices"][0]["message"]["content"] == " jumps"
    assert prompt_of(solar).endswith(f"{BEGUN}<|content|>The dog")


def test_a_prompt_may_have_begun_the_reasoning(tmp_path: Path) -> None:
    """The grammar began at the message's header, and so the answer could only begin with a second `<|think|>`."""
    template = tmp_path / "template.jinja"
    template.write_text(
        SOLAR.replace("<|begin|>assistant\n{%- endif %}", "<|begin|>assistant<|think|>{%- endif %}")
    )
    model = write_family_model("solar_open", tmp_path / "model.gguf")
    with http_server(model=str(model), context=2048, chat_template=str(template)) as server:
        server.answer = say(f"Hm.<|end|>{BEGUN}<|content|>12")
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        message = ask(server, response_format=schema)["choices"][0]["message"]
        assert prompt_of(server).endswith(f"{BEGUN}<|think|>")
        assert (message["reasoning"], message["content"]) == ("Hm.", "12")
        (rules, _) = json.loads(server.requests[-1].sampling.grammar)["grammars"]
        assert rules["lark_grammar"].startswith("start: reasoning_text <[")

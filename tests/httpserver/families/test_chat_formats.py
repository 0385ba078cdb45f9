"""Thoughts, calls and grammars in /v1/chat/completions, through the official client: scripted answers over real
messages and sockets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from moeserve.messages.reasoning import Thinking
from tests.support.chats.scripted_answers import ANSWER, MESSAGES, PARIS, REASONING_TOKENS, TOOLS, prompt_of
from tests.support.clients.official_clients import openai_client
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, echo, say

if TYPE_CHECKING:
    from openai import OpenAI


_as_new = as_new(say(*ANSWER))


@pytest.fixture(scope="module")
def openai(server: HttpServer) -> OpenAI:
    return openai_client(server.url)


def test_chat(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Here you are."
    extra = choice.message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == "Let me see."
    calls = choice.message.tool_calls or []
    functions = [call.function for call in calls if call.type == "function"]
    assert [(f.name, json.loads(f.arguments)) for f in functions] == [("weather", PARIS), ("now", {})]
    assert len(functions) == len(calls)
    assert len({call.id for call in calls}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == REASONING_TOKENS


def test_chat_stream(openai: OpenAI) -> None:
    chunks = list(
        openai.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Here you are."
    assert "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    starts = [call for call in calls if call.id]
    assert [(call.index, call.function and call.function.name) for call in starts] == [
        (0, "weather"),
        (1, "now"),
    ]
    pieces = [call.function.arguments or "" for call in calls if call.index == 0 and call.function]
    assert json.loads("".join(pieces)) == PARIS
    assert len([piece for piece in pieces if piece]) >= 3  # as they are written
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finish[-1] == "tool_calls"
    assert not any(finish[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == REASONING_TOKENS


def test_without_tools_calls_are_text(openai: OpenAI) -> None:
    variants: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for more in variants:
        answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, **more)
        (choice,) = answer.choices
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert choice.message.content.startswith("Here you are.\n\n<tool_call>\n{")
        assert choice.message.content.endswith("</tool_call>")


def test_a_call_without_a_word_has_no_content(server: HttpServer, openai: OpenAI) -> None:
    server.answer = say("<tool_call>\n", '{"name": "now", "arguments": {}}', "\n</tool_call>")
    message = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS).choices[0].message
    assert message.content is None
    assert len(message.tool_calls or []) == 1


def test_a_call_without_tags_is_a_call(server: HttpServer, openai: OpenAI) -> None:
    pieces = ("Let me see.\n", '\n{"name": "weather", "arg', 'uments": {"city": "Paris"}}')
    server.answer = say(*pieces)
    answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    chunks = list(openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(call.function.arguments or "" for call in calls if call.function)) == PARIS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    answer = openai.chat.completions.create(model=NAME, messages=MESSAGES)  # no tools are offered
    assert answer.choices[0].message.content == "".join(pieces)


def test_a_call_within_the_thought_is_a_call(server: HttpServer, openai: OpenAI) -> None:
    call = ("<tool_call>", '\n{"name": "weather", "arg', 'uments": {"city": "Paris"}}\n', "</tool_call>")
    server.answer = say("<think>", "Let me", " see.\n", *call)
    answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (choice.message.model_extra or {})["reasoning"] == "Let me see."
    (made,) = choice.message.tool_calls or []
    assert made.type == "function"
    assert json.loads(made.function.arguments) == PARIS
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    chunks = list(openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    pieces = [call.function.arguments or "" for call in calls if call.function]
    assert json.loads("".join(pieces)) == PARIS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    server.answer = say("<think>", "I could ", *call, " but no", "</think>", "No.")
    answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS)
    assert answer.choices[0].message.content == "No."
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 + len(call) + 2


def test_brackets_that_are_missing_are_closed_where_the_model_ends(
    server: HttpServer, openai: OpenAI
) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}'
    for answer, num_calls in (
        (say(text), 1),
        (say(text, stop_reason="ris"), 0),
        (say(text, reason="length"), 0),
    ):
        server.answer = answer
        choice = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS).choices[0]
        assert len(choice.message.tool_calls or []) == num_calls
        assert (choice.message.content == text) != bool(num_calls)


def test_a_call_that_is_cut_off_is_text(server: HttpServer, openai: OpenAI) -> None:
    server.answer = say("Well. <tool_call>", '{"name": "weather", "arguments": {"ci', reason="length")
    choice = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS).choices[0]
    assert choice.message.content == 'Well. <tool_call>{"name": "weather", "arguments": {"ci'
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"
    chunks = list(openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join((call.function and call.function.arguments) or "" for call in calls) == '{"ci'
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_thought_can_be_left_out(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=TOOLS, extra_body={"include_reasoning": False}
    )
    message = answer.choices[0].message
    assert message.content == "Here you are."
    assert "reasoning" not in (message.model_extra or {})
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == REASONING_TOKENS


def test_logprobs_beside_calls(openai: OpenAI) -> None:
    """Every token has its entry, those of the thought and the calls too."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1}
    answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, **asked)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == len(ANSWER)
    chunks = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, stream=True, **asked)
    entries = [e for chunk in chunks if (lp := chunk.choices[0].logprobs) for e in lp.content or []]
    assert len(entries) == len(ANSWER)


def test_the_prompt_has_tools_calls_and_results(server: HttpServer, openai: OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
    ]
    openai.chat.completions.create(model=NAME, messages=messages, tools=TOOLS)
    prompt = prompt_of(server)
    assert (
        '{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters"'
        in prompt
    )
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<think>\nHm.\n</think>" in prompt
    assert "<tool_response>\nRain.\n</tool_response>" in prompt


def test_what_is_required_travels_as_a_grammar(server: HttpServer, openai: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "now"}}
    cases: list[tuple[Any, list[str]]] = [("required", ["weather", "now"]), (named, ["now"]), ("auto", [])]
    for choice, names in cases:
        openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
        sampling = server.requests[-1].sampling
        assert [name for name in ("weather", "now") if f'\\"{name}\\"' in sampling.grammar] == names
        tokens = [server.tokenizer.encode(tag)[0] for tag in ("<think>", "</think>")]
        ending = tuple(server.tokenizer.encode("\n</think>\n\n"))
        (call,) = server.tokenizer.encode("<tool_call>")
        expected = Thinking(tokens[0], tokens[1], ending, is_open=False, budget=None, call_token=call)
        assert sampling.thinking == (expected if names else None)


def test_a_strict_tool_is_held_to_its_schema(server: HttpServer, openai: OpenAI) -> None:
    strict: Any = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=strict)
    grammar = server.requests[-1].sampling.grammar
    assert '"city"' in grammar
    assert "lazy" in grammar


def test_no_call_or_one(server: HttpServer, openai: OpenAI) -> None:
    openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice="none")
    (opening,) = server.tokenizer.encode("<tool_call>")
    assert server.requests[-1].sampling.logit_bias == {opening: -100.0}
    assert '"weather"' in prompt_of(server)
    (closing,) = server.tokenizer.encode("</tool_call>")
    server.answer = say("<tool_call>\n", '{"name": "now", "arguments": {}}', "\n", stop_reason=closing)
    answer = openai.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False
    )
    assert closing in server.requests[-1].sampling.stop_token_ids
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (answer.choices[0].model_extra or {})["stop_reason"] is None


@pytest.mark.parametrize(
    ("asked", "enabled", "budget"),
    [
        ({}, True, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "low"}, True, 1024),
        ({"reasoning_effort": "high"}, True, 16384),
        ({"reasoning_effort": "max"}, True, None),
        ({"thinking_token_budget": 7}, True, 7),
        ({"thinking_token_budget": 0}, False, None),
        ({"chat_template_kwargs": {"thinking_budget": 9}}, True, 9),
        ({"chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 9}, False, None),
    ],
)
def test_how_much_to_think(
    server: HttpServer, openai: OpenAI, asked: dict[str, Any], enabled: bool, budget: int | None
) -> None:
    openai.chat.completions.create(model=NAME, messages=MESSAGES, extra_body=asked)
    assert prompt_of(server).endswith("</think>\n\n") != enabled
    thinking = server.requests[-1].sampling.thinking
    assert (thinking and thinking.budget) == budget


def test_structured_outputs_travel_as_grammars(server: HttpServer, openai: OpenAI) -> None:
    schema = {"type": "object", "properties": {"marker": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for asked, marker in (
        ({"response_format": form}, "marker"),
        ({"response_format": {"type": "json_object"}}, '"object"'),
        ({"guided_json": json.dumps(schema)}, "marker"),
        ({"guided_regex": "mark{2}er"}, "mark{2}er"),
        ({"guided_choice": ["one", "marker"]}, '"one" | "marker"'),
        ({"guided_grammar": 'root ::= "marker"'}, "marker"),
        ({"structured_outputs": {"json": schema}}, "marker"),
        ({"structured_outputs": {"choice": ["marker"]}}, '"marker"'),
    ):
        openai.chat.completions.create(model=NAME, messages=MESSAGES, extra_body=asked)
        assert marker in server.requests[-1].sampling.grammar
        assert server.requests[-1].sampling.thinking is not None  # it may think first
        openai.completions.create(model=NAME, prompt="x", extra_body=asked)
        assert marker in server.requests[-1].sampling.grammar
        assert server.requests[-1].sampling.thinking is None
    server.answer = echo
    for parameters in (
        {"regular_constraint": "mark+"},
        {"guided_json": schema},
        {"guided_grammar": 'start: "mark"'},
    ):
        response = server.post("/generate", {"inputs": "x", "parameters": parameters})
        assert response.status_code == 200
        assert "mark" in server.requests[-1].sampling.grammar

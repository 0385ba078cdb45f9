"""What the model writes as the three chat APIs show it, through their official clients: scripted answers over real
messages and sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from moeserve.messages.schema import Thinking
from tests.unit.http_harness import NAME, HttpServer, echo, http_server, say, tokens_of

MESSAGES: Any = [{"role": "user", "content": "Who jumps?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ANTHROPIC_TOOLS: Any = [
    {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]
RESPONSES_TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "Of a city.",
        "parameters": SCHEMA,
        "strict": False,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": False},
]
ANSWER = (
    *("<think>", "\nLet me", " see.\n", "</think>", "\n\nHere", " you are.", "\n\n<tool", "_call>", "\n{"),
    *(
        '"name": "wea',
        'ther", "arg',
        'uments": {"ci',
        'ty": "Pa',
        'ris"}',
        "}\n</tool_call>",
        "\n<tool_call>\n",
    ),
    '{"name": "now", "arguments": {}}\n</tool_call>',
)
PARIS = {"city": "Paris"}
REASONING_TOKENS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _as_new(server: HttpServer) -> None:
    server.answer = say(*ANSWER)
    server.requests.clear()


@pytest.fixture(scope="module")
def openai(server: HttpServer) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def anthropic(server: HttpServer) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)


def prompt_of(server: HttpServer) -> str:
    return server.tokenizer.decode(tokens_of(server.requests[-1]), skip_special=False)


# ---------------------------------------------------------------- /v1/chat/completions


def test_chat(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Here you are."
    extra = choice.message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == "Let me see."
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", PARIS),
        ("now", {}),
    ]  # type: ignore[union-attr]
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
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, **more)  # type: ignore[call-overload]
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
    for choice, names in (("required", ["weather", "now"]), (named, ["now"]), ("auto", [])):
        openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
        sampling = server.requests[-1].sampling
        assert [name for name in ("weather", "now") if f'\\"{name}\\"' in sampling.grammar] == names
        tokens = [server.tokenizer.encode(tag)[0] for tag in ("<think>", "</think>")]
        ending = tuple(server.tokenizer.encode("\n</think>\n\n"))
        expected = Thinking(tokens[0], tokens[1], ending, is_open=False, budget=None)
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


# ---------------------------------------------------------------- /v1/messages


def test_messages(server: HttpServer, anthropic: Anthropic) -> None:
    message = anthropic.messages.create(
        model=NAME,
        max_tokens=100,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=MESSAGES,
        tools=ANTHROPIC_TOOLS,
        thinking={"type": "enabled", "budget_tokens": 50},
    )
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, weather, now = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Let me see."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == "Here you are."
    assert weather.type == now.type == "tool_use"
    assert (weather.name, weather.input) == ("weather", PARIS)
    assert (now.name, now.input) == ("now", {})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.output_tokens == len(ANSWER)
    assert message.usage.input_tokens == len(tokens_of(server.requests[-1]))
    assert message._request_id is not None
    assert message.id == f"msg_{message._request_id}"
    assert "Be brief." in prompt_of(server)
    assert server.requests[-1].sampling.thinking is not None
    assert server.requests[-1].sampling.thinking.budget == 50


def test_messages_stream(anthropic: Anthropic) -> None:
    with anthropic.messages.stream(
        model=NAME, max_tokens=100, messages=MESSAGES, tools=ANTHROPIC_TOOLS, thinking={"type": "adaptive"}
    ) as stream:
        types = [event.type for event in stream]
        message = stream.get_final_message()
    assert types[0] == "message_start"
    assert types[-2:] == ["message_delta", "message_stop"]
    assert types.count("content_block_start") == types.count("content_block_stop") == 4
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [PARIS, {}]
    assert message.content[0].type == "thinking"
    assert (message.content[0].thinking, message.content[0].signature) == ("Let me see.", "unsigned")
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(ANSWER)


def test_the_events_of_a_messages_stream(server: HttpServer) -> None:
    """On the wire: named events, one ping, no [DONE]."""
    server.answer = say("Hello", " there", reason="length")
    body = {"model": NAME, "max_tokens": 2, "messages": MESSAGES, "stream": True}
    lines = server.post("/v1/messages", body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    deltas = ["content_block_delta"] * 2
    block = ["content_block_start", *deltas, "content_block_stop"]
    assert names == ["message_start", "ping", *block, "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 2


def test_messages_stop_reasons(server: HttpServer, anthropic: Anthropic) -> None:
    def stop(max_tokens: int = 100) -> tuple[str | None, str | None]:
        message = anthropic.messages.create(
            model=NAME, max_tokens=max_tokens, messages=MESSAGES, stop_sequences=["END"]
        )
        return message.stop_reason, message.stop_sequence

    for end, expected in (
        (say("Hi"), ("end_turn", None)),
        (say("Hi", stop_reason=4089), ("end_turn", None)),
        (say("Hi", stop_reason="END"), ("stop_sequence", "END")),
        (say("Hi", reason="length"), ("max_tokens", None)),
    ):
        server.answer = end
        assert stop() == expected
    assert server.requests[-1].text.stop == ("END",)
    assert stop(max_tokens=100_000) == ("model_context_window_exceeded", None)


def test_a_conversation_of_blocks(server: HttpServer, anthropic: Anthropic) -> None:
    server.answer = say("Fine.")
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": PARIS},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "No such city.", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    anthropic.messages.create(model=NAME, max_tokens=10, messages=messages, tools=ANTHROPIC_TOOLS)
    prompt = prompt_of(server)
    for part in (
        "<|im_start|>user\none\ntwo<|im_end|>",
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "<tool_response>\nError: No such city.\n</tool_response>",
        "<|im_start|>user\nGo on.<|im_end|>",
    ):
        assert part in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")  # not asked to think


def test_messages_tool_choice_and_format(server: HttpServer, anthropic: Anthropic) -> None:
    server.answer = say("Fine.")
    for choice, names in (
        ({"type": "any"}, ["weather", "now"]),
        ({"type": "tool", "name": "now"}, ["now"]),
        ({"type": "auto"}, []),
    ):
        anthropic.messages.create(
            model=NAME, max_tokens=10, messages=MESSAGES, tools=ANTHROPIC_TOOLS, tool_choice=choice
        )  # type: ignore[call-overload]
        grammar = server.requests[-1].sampling.grammar
        assert [name for name in ("weather", "now") if f'\\"{name}\\"' in grammar] == names
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    anthropic.messages.create(
        model=NAME, max_tokens=10, messages=MESSAGES, extra_body={"output_config": form}
    )
    assert "city" in server.requests[-1].sampling.grammar


def test_count_tokens_is_what_the_message_takes(server: HttpServer, anthropic: Anthropic) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "tools": ANTHROPIC_TOOLS, "system": "Hm."}
    counted = anthropic.messages.count_tokens(**asked).input_tokens
    assert anthropic.messages.create(max_tokens=10, **asked).usage.input_tokens == counted
    assert counted == len(tokens_of(server.requests[-1]))


def test_errors_come_in_each_apis_shape(server: HttpServer) -> None:
    error = server.post("/v1/messages", {"model": NAME, "messages": MESSAGES}).json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in error["error"]["message"]
    assert error["request_id"]
    assert httpx.get(server.url + "/v1/messages").json()["type"] == "error"
    assert (
        server.post("/v1/messages", {"model": "x", "max_tokens": 1, "messages": MESSAGES}).status_code == 404
    )
    assert (
        server.post("/v1/responses", {"model": "x", "input": "x"}).json()["error"]["code"]
        == "model_not_found"
    )


# ---------------------------------------------------------------- /v1/responses


def test_responses(openai: OpenAI) -> None:
    response = openai.responses.create(
        model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS, include=["reasoning.encrypted_content"]
    )
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    thought, message, weather, now = response.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or []] == ["Let me see."]
    assert response.output_text == "Here you are."
    assert message.type == "message"
    assert weather.type == now.type == "function_call"
    assert (weather.name, json.loads(weather.arguments)) == ("weather", PARIS)
    assert now.arguments == "{}"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == REASONING_TOKENS


def test_responses_stream(openai: OpenAI) -> None:
    with openai.responses.stream(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert types.count("response.output_item.added") == types.count("response.output_item.done") == 4
    assert types.count("response.function_call_arguments.delta") >= 4
    whole = openai.responses.create(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS)

    def gist(items: Any) -> list[Any]:
        kept = ("type", "status", "arguments", "name", "summary")
        texts = [part.text for item in items for part in getattr(item, "content", None) or []]
        return texts + [{key: item.to_dict().get(key) for key in kept} for item in items]

    assert gist(response.output) == gist(whole.output)


def test_a_response_goes_on_from_another(server: HttpServer, openai: OpenAI) -> None:
    first = openai.responses.create(
        model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS, instructions="Be brief."
    )
    server.answer = say("It rains.")
    call = next(item for item in first.output if item.type == "function_call")
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    second = openai.responses.create(
        model=NAME, input=results, previous_response_id=first.id, tools=RESPONSES_TOOLS
    )
    prompt = prompt_of(server)
    for part in (
        "<|im_start|>user\nWho jumps?<|im_end|>",
        'Here you are.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "<think>\nLet me see.\n</think>",
        "<tool_response>\nRain.\n</tool_response>",
    ):
        assert part in prompt
    assert "Be brief." not in prompt  # instructions are not taken over
    third = openai.responses.create(model=NAME, input="Thanks.", previous_response_id=second.id, store=False)
    assert "It rains." in prompt_of(server)
    assert "Who jumps?" in prompt_of(server)
    assert httpx.get(f"{server.url}/v1/responses/{third.id}").status_code == 404  # not stored
    assert openai.responses.retrieve(second.id).output_text == "It rains."
    (item,) = openai.responses.input_items.list(second.id).data
    assert item.type == "function_call_output"
    openai.responses.delete(first.id)
    broken = server.post("/v1/responses", {"input": "x", "previous_response_id": second.id})
    assert broken.status_code == 404
    assert first.id in broken.json()["error"]["message"]


def test_a_conversation_without_the_store(server: HttpServer, openai: OpenAI) -> None:
    """Output items go back as they came, the thought in its opaque form."""
    first = openai.responses.create(
        model=NAME, input="Who?", tools=RESPONSES_TOOLS, store=False, include=["reasoning.encrypted_content"]
    )
    items: list[Any] = [{"role": "user", "content": "Who?"}]
    for item in first.output:
        plain = item.to_dict()
        if plain["type"] == "reasoning":
            plain.pop("content")
        items.append(plain)
    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "Noon."})
    openai.responses.create(model=NAME, input=items, tools=RESPONSES_TOOLS, store=False)
    prompt = prompt_of(server)
    assert "<think>\nLet me see.\n</think>\n\nHere you are." in prompt
    assert prompt.count("<tool_call>\n{") == 2 + 1  # and the one in the template's own words
    assert "Noon." in prompt


def test_input_items_come_in_pages(server: HttpServer, openai: OpenAI) -> None:
    server.answer = say("Fine.")
    given: Any = [{"role": "user", "content": f"Message {i}"} for i in range(7)]
    response = openai.responses.create(model=NAME, input=given)
    pages = openai.responses.input_items.list(response.id, limit=3, order="asc")
    texts = [item.content[0].text for item in pages if item.type == "message"]  # type: ignore[union-attr]
    assert texts == [f"Message {i}" for i in range(7)]
    newest = openai.responses.input_items.list(response.id, limit=1).data[0]
    assert newest.content[0].text == "Message 6"  # type: ignore[union-attr]


def test_responses_that_end_early_or_badly(server: HttpServer, openai: OpenAI) -> None:
    server.answer = say("Half an", reason="length")
    response = openai.responses.create(model=NAME, input="x", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]

    from moeserve.messages.schema import RequestError, TextItem, TextOut

    def fail(server: HttpServer, request: Any) -> None:
        server.send(TextOut([TextItem(request.id, "Half", [5])]))
        server.send(RequestError(request.id, 500, "the engine is out of breath"))

    server.answer = fail
    events = list(openai.responses.create(model=NAME, input="x", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "out of breath" in events[-1].response.error.message
    with pytest.raises(Exception, match="out of breath"):
        openai.responses.create(model=NAME, input="x")


def test_input_tokens_are_counted(server: HttpServer, openai: OpenAI) -> None:
    counted = openai.responses.input_tokens.count(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS)
    openai.responses.create(model=NAME, input="Who jumps?", tools=RESPONSES_TOOLS)
    assert counted.input_tokens == len(tokens_of(server.requests[-1]))

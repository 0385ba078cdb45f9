"""/v1/messages through the official client: scripted answers over real messages and sockets."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.chats.scripted_answers import ANSWER, ANTHROPIC_TOOLS, MESSAGES, PARIS, SCHEMA, prompt_of
from tests.support.clients.official_clients import anthropic_client
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import NAME, HttpServer, say, tokens_of

if TYPE_CHECKING:
    from anthropic import Anthropic


_as_new = as_new(say(*ANSWER))


@pytest.fixture(scope="module")
def anthropic(server: HttpServer) -> Anthropic:
    return anthropic_client(server.url)


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


def test_what_claude_code_sends_is_taken(server: HttpServer) -> None:
    """The fields of Claude Code 2.1.197's requests, as they came over the wire, with shorter texts."""
    body: dict[str, Any] = {
        "model": NAME,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\n</system-reminder>"},
                    {"type": "text", "text": "Say hi", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": "Available agent types: none."},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": ANTHROPIC_TOOLS,
        "metadata": {"user_id": "{}"},
        "max_tokens": 40,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    response = server.post("/v1/messages?beta=true", body)
    assert response.status_code == 200, response.text
    assert "message_stop" in response.text


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


def test_anthropics_tool_runner_goes_on_without_threads(server: HttpServer, anthropic: Anthropic) -> None:
    from anthropic import beta_tool

    @beta_tool
    def now() -> str:
        """The time."""
        return "noon"

    call = say("<tool_call>\n", '{"name": "now", "arguments": {}}', "\n</tool_call>")
    answers = iter([call, call, say("It is noon.")])
    server.answer = lambda one, request: next(answers)(one, request)
    runner = anthropic.beta.messages.tool_runner(
        model=NAME, max_tokens=50, tools=[now], messages=[{"role": "user", "content": "When?"}]
    )
    message = runner.until_done()
    assert [block.text for block in message.content if block.type == "text"] == ["It is noon."]
    assert prompt_of(server).count("<tool_response>\nnoon\n</tool_response>") == 2
    body = {
        "model": NAME,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
        "thread": {"a": 1},
    }
    refused = server.post("/v1/messages", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_anthropics_client_reads_the_models(anthropic: Anthropic) -> None:
    page = anthropic.models.list()
    (card,) = page.data
    assert (card.id, card.type, card.display_name, card.max_input_tokens) == (NAME, "model", NAME, CONTEXT)
    assert abs(datetime.now(UTC) - card.created_at) < timedelta(hours=1)
    assert (page.has_more, page.first_id, page.last_id) == (False, NAME, NAME)
    assert anthropic.models.retrieve(NAME) == card


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


def test_a_full_context_is_told_in_anthropics_words(server: HttpServer) -> None:
    """Claude Code and others look for these numbers, and then compact the conversation."""

    def refused(count: int) -> str:
        messages = [{"role": "user", "content": "word " * count}]
        answer = server.post("/v1/messages", {"model": NAME, "max_tokens": 8, "messages": messages})
        assert answer.status_code == 400
        message: str = answer.json()["error"]["message"]
        return message

    assert re.fullmatch(r"prompt is too long: \d+ tokens > 512 maximum", refused(3000))
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 512 maximum", refused(300_000))

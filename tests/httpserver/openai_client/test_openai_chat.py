"""Chat through the official openai client, against the real process and an echoing engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.httpserver.openai_events import CHAT
from tests.support.servers.engine_messages import logprobs_of
from tests.support.servers.http_harness import NAME, HttpServer, tokens_of

if TYPE_CHECKING:
    from openai import OpenAI


def test_chat_renders_the_models_template(client: OpenAI, server: HttpServer) -> None:
    answer = client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=4)
    prompt = server.tokenizer.decode(tokens_of(server.requests[0]), skip_special=False)
    assert prompt.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho jumps?<|im_end|>"
    )
    assert prompt.endswith("<|im_start|>assistant\n")
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content == server.tokenizer.decode(tokens_of(server.requests[0])[:4], skip_special=False)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_chat_template_kwargs_reach_the_template(server: HttpServer) -> None:
    body = {"messages": CHAT, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    server.post("/v1/chat/completions", body)
    prompt = server.tokenizer.decode(tokens_of(server.requests[0]), skip_special=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_messages_of_other_clients_shapes(server: HttpServer) -> None:
    """Text parts, the developer role, nulls, and a history with a tool call."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "dog"}'}}
    last = {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}, "image_url": None}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, last]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "1", "content": "a dog"},
    ]
    neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me"}
    body = {"messages": messages, "max_tokens": 1, "temperature": None, "store": False} | neutral
    assert server.post("/v1/chat/completions", body).status_code == 200
    prompt = server.tokenizer.decode(tokens_of(server.requests[0]), skip_special=False)
    for part in ("<|im_start|>system\nBe kind.", "user\none\ntwo<|im_end|>", '"at": "dog"', "a dog"):
        assert part in prompt


def test_the_result_of_a_tool_that_returns_nothing(server: HttpServer) -> None:
    """Clients send null for it: the template gets an empty result."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {
        "messages": [*CHAT, asked, {"role": "tool", "tool_call_id": "1", "content": None}],
        "max_tokens": 1,
    }
    assert server.post("/v1/chat/completions", body).status_code == 200
    prompt = server.tokenizer.decode(tokens_of(server.requests[0]), skip_special=False)
    assert "<tool_response>\n\n</tool_response>" in prompt


def test_streamed_chat_role_text_end_usage(client: OpenAI, server: HttpServer) -> None:
    stream = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=3, n=2, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = list(stream)
    for index in (0, 1):
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == server.tokenizer.decode(tokens_of(server.requests[0])[:3], skip_special=False)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6


def test_chat_logprobs_with_bytes(client: OpenAI, server: HttpServer) -> None:
    request: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": 3, "logprobs": True}
    whole = client.chat.completions.create(**request, top_logprobs=2).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    for token, entry in zip(tokens_of(server.requests[0])[:3], whole.content, strict=True):
        expected = logprobs_of(token, 2)
        assert bytes(entry.bytes or []) == server.tokenizer.token_bytes(token)
        assert entry.token == server.tokenizer.token_text(token)
        assert [top.logprob for top in entry.top_logprobs] == list(expected.top_logprobs)
    none = client.chat.completions.create(**request).choices[0].logprobs
    assert none is not None
    assert none.content is not None
    assert all(entry.top_logprobs == [] for entry in none.content)

"""Answers asked all at once from a server that loses processes, and what the undisturbed server gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from tests.e2e.completions import TEXT
from tests.support.servers.server import Server, stream_events

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CHAT = "/v1/chat/completions"


PENALTIES = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
MESSAGES = [{"role": "user", "content": TEXT}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
Asked = tuple[str, dict[str, Any]]  # a path and a body


def text(i: int, tokens: int, **how: Any) -> Asked:
    """A completion of a prompt of its own; greedy unless `how` says otherwise."""
    prompt = f"{i} {TEXT * (1 + i % 4)}"
    return "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0} | how


def echoed() -> Asked:
    return text(0, 40, prompt=TEXT * 9, logprobs=1, echo=True)


def schema(**how: Any) -> Asked:
    return CHAT, {"messages": MESSAGES, "max_tokens": 120, "response_format": FORMAT} | how


def call(tokens: int, **how: Any) -> Asked:
    return CHAT, {
        "messages": MESSAGES,
        "max_tokens": tokens,
        "tools": [TOOL],
        "tool_choice": "required",
    } | how


def bodies(tokens: int = 200) -> list[Asked]:
    """Requests of every kind whose answer depends on what was said before."""
    return [
        *(text(i, tokens) for i in range(6)),
        *(text(i, tokens, temperature=1, seed=i) for i in range(3)),
        text(0, tokens, temperature=0.9, seed=5, n=2, logprobs=3, **PENALTIES),
        echoed(),
        schema(temperature=1, seed=3),
        call(tokens, temperature=0),
    ]


def many_bodies(tokens: int) -> list[Asked]:
    """16 greedy streams and 8 sampled ones with seeds."""
    return [
        *(text(i, tokens) for i in range(12)),
        echoed(),
        text(3, tokens, **PENALTIES),
        schema(temperature=0),
        call(tokens, temperature=0),
        *(text(i, tokens, temperature=1, seed=i) for i in range(4)),
        text(5, tokens, temperature=0.9, seed=5, n=2, logprobs=3, **PENALTIES),
        schema(temperature=1, seed=3),
        schema(temperature=0.7, seed=8),
        call(tokens, temperature=1, seed=4),
    ]


def stream(server: Server, path: str, body: dict[str, Any]) -> tuple[list[Any], float]:
    """What the choices of a streamed answer say, and its usage; and the longest pause in seconds."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": path != CHAT}
    said: dict[int, list[Any]] = {}
    usage: Any = None
    pause, last = 0.0, time.monotonic()
    with (
        httpx.Client(timeout=120) as client,
        client.stream("POST", server.base_url + path, json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        for event in stream_events(response):
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                said.setdefault(choice["index"], []).append(content_of(choice))
            pause, last = max(pause, time.monotonic() - last), time.monotonic()
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return [[joined(said[index]) for index in sorted(said)], counts], pause


def content_of(choice: dict[str, Any]) -> tuple[str, list[Any], Any]:
    """The text or the calls, the logprobs and the end of an event's choice."""
    delta = choice.get("delta", {})
    calls = [call["function"].get("arguments", "") for call in delta.get("tool_calls") or []]
    text = choice.get("text") or delta.get("content") or "".join(calls)
    logprobs = choice.get("logprobs") or {}
    return text, logprobs.get("token_logprobs") or [], choice.get("finish_reason")


def joined(parts: list[tuple[str, list[Any], Any]]) -> tuple[str, list[Any], Any]:
    text = "".join(part[0] for part in parts)
    return text, [logprob for part in parts for logprob in part[1]], parts[-1][2]


@contextmanager
def all_at_once(server: Server, requests: list[Asked]) -> Iterator[list[Future[Any]]]:
    with ThreadPoolExecutor(len(requests)) as pool:
        yield [pool.submit(stream, server, path, body) for path, body in requests]


def health(server: Server) -> int:
    with suppress(httpx.TransportError):
        return httpx.get(server.base_url + "/health", timeout=5).status_code
    return 0


def generated(server: Server) -> float:
    return server.metrics()["moeserve:generation_tokens_total"]


def has_generated(server: Server, tokens: float) -> bool:
    return generated(server) > tokens

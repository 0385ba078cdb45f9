"""Answers of a million values: they are written beside the streams, and not in one turn of the event loop."""

from __future__ import annotations

from typing import Any, Final

import httpx
import pytest

from moeserve.messages.schema import GenerateRequest, TextItem, TextOut, Usage
from tests.support.measuring.event_loop import longest_while
from tests.support.servers.engine_messages import logprobs_of
from tests.support.servers.http_harness import HttpServer, tokens_of

CHOICES, TOKENS, TOP = 128, 100, 20
MESSAGES: Final = [{"role": "user", "content": "Hi"}]


def at_once(server: HttpServer, request: GenerateRequest) -> None:
    """All tokens of a choice in one message, as a test may send them faster than an engine computes them."""
    ids = [300 + i % 500 for i in range(request.sampling.max_tokens)]
    top = request.sampling.logprobs
    logprobs = None if top is None else [logprobs_of(token_id, top) for token_id in ids]
    usage = Usage(len(tokens_of(request)), len(ids), 0, 1.0, 2.0, 4.0)
    text = "".join(map(server.tokenizer.token_text, ids))
    server.send(TextOut([TextItem(request.id, text, ids, logprobs, finish_reason="length", usage=usage)]))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "n": CHOICES, "logprobs": TOP}),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": CHOICES, "logprobs": True, "top_logprobs": TOP}),
    ],
    ids=["completions", "chat"],
)
def test_a_large_answer_holds_up_nobody(server: HttpServer, path: str, body: dict[str, Any]) -> None:
    answers: list[httpx.Response] = []
    server.answer = at_once
    asked = body | {"max_tokens": TOKENS, "ignore_eos": True}

    def ask() -> None:
        answers.append(httpx.post(server.url + path, json=asked, timeout=120))

    longest = longest_while(server, ask)
    choices = answers[0].json()["choices"]
    assert len(choices) == CHOICES
    for choice in choices:
        logprobs = choice["logprobs"]
        entries = logprobs["content"] if "content" in logprobs else logprobs["top_logprobs"]
        assert len(entries) == TOKENS
    assert longest < 0.3

"""Which model a request is for, as clients write it."""

from __future__ import annotations

import asyncio

import pytest

from moeserve.front.requested_model import FOREVER, Asked, asked_in
from moeserve.httpserver.transport.errors import ApiError

CHAT = "/v1/chat/completions"
OLLAMA_CHAT = "/api/chat"


@pytest.mark.parametrize(
    ("path", "query", "body", "asked"),
    [
        (CHAT, b"", b'{"model": "a"}', Asked("a")),
        (CHAT, b"", b'{"messages": [{"model": "b"}], "model": "a", "stream": true}', Asked("a", True)),
        (CHAT, b"", b'{"model": "a", "model": "b"}', Asked("b")),  # as every JSON reader here has it
        (CHAT, b"", b'{"stream": "true"}', Asked(None)),  # the model's server refuses it
        (CHAT, b"", b'{"model": null}', Asked(None)),
        (CHAT, b"", b"", Asked(None)),
        (OLLAMA_CHAT, b"", b'{"model": "a", "messages": [1], "stream": false}', Asked("a")),
        ("/generate_stream", b"", b'{"inputs": "x"}', Asked(None, True)),
        (CHAT, b"", b" \n", Asked(None)),
        ("/props", b"model=org%2Fname%3AQ4", b"", Asked("org/name:Q4")),
        ("/completion", b"model=a", b'{"prompt": "x"}', Asked("a")),
        (CHAT, b"", b'{"model": "gr\\u00f6\\u00dfe"}', Asked("größe")),
        (CHAT, b"", b'{"messages": "half an emoji: \\ud83d", "model": "a"}', Asked("a")),
        (OLLAMA_CHAT, b"", b'{"model": "a:latest", "messages": [{"role": "user"}]}', Asked("a", False, True)),
        ("/api/show", b"", b'{"name": "a"}', Asked("a", False, True, only_loads=True)),
        ("/api/generate", b"", b'{"model": "a", "keep_alive": 0}', Asked("a", False, True, 0.0, True)),
        (
            "/api/generate",
            b"",
            b'{"model": "a", "prompt": "x", "keep_alive": "5m"}',
            Asked("a", False, True, 300.0),
        ),
        (
            "/api/generate",
            b"",
            b'{"model": "a", "prompt": "x", "keep_alive": "1h30m"}',
            Asked("a", False, True, 5400.0),
        ),
        (
            "/api/generate",
            b"",
            b'{"model": "a", "prompt": "x", "keep_alive": -1}',
            Asked("a", False, True, FOREVER),
        ),
        (
            "/api/generate",
            b"",
            b'{"model": "a", "prompt": "x", "keep_alive": "-1m"}',
            Asked("a", False, True, FOREVER),
        ),
        (
            "/api/generate",
            b"",
            b'{"model": "a", "prompt": "x", "keep_alive": "3600"}',
            Asked("a", False, True, 3600.0),
        ),
        (
            "/api/generate",
            b"",
            b'{"model": "a", "prompt": "x", "keep_alive": "soon"}',
            Asked("a", False, True),
        ),
        ("/api/generate", b"", b'{"model": "a", "prompt": "x", "keep_alive": true}', Asked("a", False, True)),
        (
            OLLAMA_CHAT,
            b"",
            b'{"model": "a", "messages": [ ], "keep_alive": 0}',
            Asked("a", False, True, 0.0, True),
        ),
    ],
)
def test_asked(path: str, query: bytes, body: bytes, asked: Asked) -> None:
    assert asyncio.run(asked_in(path, query, body)) == asked


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b'{"model": "a"} x', "not valid JSON"),
        (b'{"model": "a", "x": NaN}', "not valid JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"x": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"a"', "must be a JSON object"),
        (b'{"model": 7}', "model: must be a string"),
        (b'{"model": ["a"]}', "model: must be a string"),
    ],
)
def test_what_is_no_request_has_no_model_loaded(body: bytes, says: str) -> None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(asked_in(CHAT, b"", body))
    assert refused.value.status == 400
    assert says in refused.value.message

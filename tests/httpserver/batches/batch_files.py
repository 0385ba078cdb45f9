"""Input files of batches, and what comes out of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.servers.http_harness import NAME, HttpServer
from tests.support.servers.waiting import within

if TYPE_CHECKING:
    import openai

CHAT = "/v1/chat/completions"


@contextmanager
def refused(status: int, words: str = "") -> Iterator[None]:
    """The block ends with such an answer, whose message has the words."""
    import openai

    with pytest.raises(openai.APIStatusError) as caught:
        yield
    assert caught.value.status_code == status
    assert words in str(caught.value)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def client_of(server: HttpServer, key: str = "none") -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def create(client: openai.OpenAI, data: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=fields.pop("window", "24h"), **fields
    )


def ended(client: openai.OpenAI, batch_id: str, seconds: float = 60) -> Any:
    ends = ("completed", "failed", "expired", "cancelled")
    assert within(seconds, lambda: client.batches.retrieve(batch_id).status in ends)
    return client.batches.retrieve(batch_id)


def completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]

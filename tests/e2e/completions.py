"""What several end-to-end tests do: complete a prompt, ask many at once, wait for the server to settle."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from tests.support.servers.server import Server, stream_events

In = TypeVar("In")
Out = TypeVar("Out")

# In words that the tiny model's small vocabulary splits into few tokens.
TEXT = "The quick brown fox jumps over the lazy dog. "


def completion(server: Server, **body: Any) -> dict[str, Any]:
    """The only choice of a /v1/completions request; greedy and 16 tokens unless `body` says otherwise."""
    answer = server.post("/v1/completions", {"temperature": 0, "max_tokens": 16, "ignore_eos": True} | body)
    (choice,) = answer["choices"]
    return dict(choice)


def from_cache(server: Server, **body: Any) -> dict[str, Any]:
    """As `completion`, once all of the prompt but its last token is in the cache: whoever asks the same later, on an
    engine that is not batch invariant too, gets the same."""
    completion(server, **body)
    return completion(server, **body)


def streamed(
    server: Server, path: str = "/v1/completions", **body: Any
) -> Generator[dict[str, Any], None, None]:
    """The events of a streamed request; greedy and 16 tokens long unless `body` says otherwise."""
    defaults = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", server.base_url + path, json=defaults | body) as response,
    ):
        if response.status_code != 200:
            response.read()
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        yield from stream_events(response)


def at_once(ask: Callable[[In], Out], questions: Sequence[In]) -> list[Out]:
    """Asks every question from a thread of its own, all released together; answers in their order."""
    barrier = threading.Barrier(len(questions))

    def wait_and_ask(question: In) -> Out:
        barrier.wait(30)
        return ask(question)

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(wait_and_ask, questions))


def running(server: Server) -> float:
    return server.metrics()["moeserve:num_requests_running"]


def waiting(server: Server) -> float:
    return server.metrics()["moeserve:num_requests_waiting"]


def is_empty(server: Server) -> bool:
    """No request anywhere, and not one KV slot in use."""
    metrics = server.metrics()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(metrics["moeserve:" + name] == 0 for name in names)


def health_url(server: Server) -> str:
    """The health port's address of a server that was started with --health-port."""
    found = re.search(r"health and metrics: (\S+)", server.log)
    assert found is not None, server.log
    return found[1]

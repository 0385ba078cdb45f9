"""Clients of a real server for the benchmarks of the router: streams with the time of every token."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.servers.server import Server


class StreamError(RuntimeError):
    """An error event within a stream. `code` is the API's, such as "overloaded"."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error.get("code")


@dataclass
class Answer:
    """What one client saw. Times are seconds of time.perf_counter()."""

    sent: float
    times: list[float] = field(default_factory=list)  # of each token
    tokens: list[str] = field(default_factory=list)  # "token_id:123"
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    def gaps(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Between tokens, both within the stretch, smallest first."""
        times = [t for t in self.times if start <= t <= end]
        return sorted(b - a for a, b in itertools.pairwise(times))

    def speed(self, start: float, end: float) -> float:
        """Tokens a second."""
        return sum(start <= t < end for t in self.times) / (end - start)


def client(server: Server, **more: Any) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.base_url, timeout=600, limits=limits, **more)


async def ask(
    client: httpx.AsyncClient, prompt: list[int], into: Answer | None = None, **body: Any
) -> Answer:
    """Streams /v1/completions; greedy and without an end token unless `body` says otherwise. `into` can be watched
    meanwhile. Raises httpx.HTTPStatusError, and StreamError."""
    request = {
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 0,  # brings the tokens
        "return_tokens_as_token_ids": True,
    }
    answer = Answer(time.perf_counter()) if into is None else into
    async with client.stream("POST", "/v1/completions", json=request | body) as response:
        if response.status_code != 200:
            await response.aread()
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(answer, json.loads(line[len("data: ") :]))
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise StreamError(event["error"])
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else []
        answer.tokens += tokens
        answer.times += [time.perf_counter()] * len(tokens)
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Raises TimeoutError when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def prompt_ids(length: int, seed: int, highest: int = 4000) -> list[int]:
    """Random tokens that every model of ours has; the first ones are control tokens in none."""
    rng = random.Random(seed)
    return [rng.randrange(300, highest) for _ in range(length)]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

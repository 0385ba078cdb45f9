"""Streamed answers through a gateway: how each ended, and whether it is what an undisturbed server writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.e2e.completions import TEXT
from tests.support.servers.server import stream_events

SILENT = "nothing"  # the worst: an end that looks like one, and is none


@dataclass(frozen=True)
class Streamed:
    end: str  # its finish_reason, "error …" or SILENT
    text: str  # with the thought

    @property
    def is_lost(self) -> bool:
        return self.end.startswith("error")


def stream(url: str, number: int, tokens: int) -> Streamed:
    """A greedy answer to a question of this number, which goes on for so many tokens."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"{number} {TEXT}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    try:
        with (
            httpx.Client(timeout=120) as client,
            client.stream("POST", url + "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                return Streamed(f"error {response.status_code}", text)
            for event in stream_events(response):
                if "error" in event:
                    return Streamed(f"error {event['error']}", text)
                for choice in event["choices"]:
                    delta = choice["delta"]
                    text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    if choice["finish_reason"]:
                        return Streamed(str(choice["finish_reason"]), text)
            return Streamed(SILENT, text)
    except httpx.TransportError as error:
        return Streamed(f"error {type(error).__name__}", text)


def lost(answers: Sequence[Streamed], undisturbed: Sequence[Streamed]) -> int:
    """How many answers ended with an error, after the beginning of what an undisturbed server writes (the CPU engine
    writes the same whatever runs beside). Raises AssertionError unless all others are whole."""
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert expected.end == "length"
        if answer.is_lost:
            assert expected.text.startswith(answer.text)
        else:
            assert answer == expected
    return sum(answer.is_lost for answer in answers)


@contextmanager
def streaming(url: str, clients: int, tokens: int) -> Iterator[list[Streamed]]:
    """Clients that stream one answer after the other; yields the ends so far, which are all there afterwards."""
    over = threading.Event()
    ends: list[Streamed] = []

    def ask_on(client: int) -> None:
        number = 1000 * client
        while not over.is_set():
            ends.append(stream(url, number, tokens))
            number += 1

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask_on, client) for client in range(clients)]
        try:
            yield ends
        finally:
            over.set()
        for one in asking:
            one.result(120)

"""Streams whose answers must not change while something else happens."""

from __future__ import annotations

import threading
from typing import Self

import httpx

from tests.e2e.completions import TEXT, streamed
from tests.support.servers.server import Server


class SteadyStreams(threading.Thread):
    """Streams one answer again and again until stopped, and keeps every text that it got."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.texts: list[str] = []
        self.error: Exception | None = None
        self._server = server
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                events = streamed(self._server, prompt=TEXT, max_tokens=200)
                self.texts.append("".join(event["choices"][0]["text"] for event in events))
        except (httpx.HTTPError, KeyError) as error:
            self.error = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Also when the test has failed: the server is one of all tests."""
        self._ended.set()
        self.join(30)

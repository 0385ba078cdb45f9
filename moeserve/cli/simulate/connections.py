"""The program that the clients are, in virtual time: as `bench serve`, one process that opens a connection for each
request that finds none free.

An event loop begins the connections of all requests that are there before it sends the first of them. So requests that
are asked at once reach httpserver late and together, and not one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from moeserve.messages.schema import GenerateRequest

At = Callable[[float, Callable[[float], None]], None]  # (virtual seconds, action at that time)


class Connections:
    def __init__(self, connect: float, at: At, send: Callable[[GenerateRequest, float], None]) -> None:
        """connect: seconds that opening one takes. `send` takes each request when it leaves."""
        self._connect = connect
        self._at = at
        self._send = send
        # Connections on which no request is open; one is left from asking the server for its models.
        self._free = 1
        self._asked: list[GenerateRequest] = []  # for the next round
        self._is_busy = False

    def ask(self, request: GenerateRequest, now: float) -> None:
        if self._free:
            self._free -= 1
            self._send(request, now)
            return
        self._asked.append(request)
        if not self._is_busy:
            self._is_busy = True
            self._at(now, self._begin_round)  # after the others that are asked now

    def ended(self) -> None:
        """An answer has: its connection stays open."""
        self._free += 1

    def _begin_round(self, now: float) -> None:
        opened, self._asked = self._asked, []
        self._is_busy = bool(opened)
        if opened:
            self._at(now + len(opened) * self._connect, lambda now: self._end_round(opened, now))

    def _end_round(self, opened: list[GenerateRequest], now: float) -> None:
        for request in opened:
            self._send(request, now)
        self._begin_round(now)

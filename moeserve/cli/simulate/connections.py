"""The connections of the client program in virtual time: like `bench serve`, one process that opens a connection for
each request unless one is free.

An event loop starts to connect for all requests that are there before it sends the first of them. So simultaneous
requests reach httpserver late and all together, not one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from moeserve.messages.schema import GenerateRequest

At = Callable[[float, Callable[[float], None]], None]  # (virtual seconds, action at that time)


class Connections:
    def __init__(self, connect: float, at: At, send: Callable[[GenerateRequest, float], None]) -> None:
        """connect: seconds that opening a connection takes. `send`: called with each request when it leaves."""
        self._connect = connect
        self._at = at
        self._send = send
        # Connections without an open request; the first one was used to ask for the server's models.
        self._free = 1
        self._asked: list[GenerateRequest] = []  # requests for the next round
        self._is_busy = False

    def ask(self, request: GenerateRequest, now: float) -> None:
        if self._free:
            self._free -= 1
            self._send(request, now)
            return
        self._asked.append(request)
        if not self._is_busy:
            self._is_busy = True
            self._at(now, self._begin_round)  # after all other requests of this moment

    def ended(self) -> None:
        """Call it when an answer has ended: its connection stays open and is free."""
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

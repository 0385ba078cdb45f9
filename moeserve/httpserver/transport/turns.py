"""Whose bytes are parsed next, and whose request begins: connections take turns on the event loop.

All connections and all answers share one thread. In a turn a slice of a connection's bytes is parsed (`held_input.py`),
or a request begins; between turns the loop writes what answers have.

A request that has no key and does not reach the engine is a stranger's: a refusal, a probe, a page. While answers are
under way, all strangers together get a share of the thread's time. They have it in equal parts (`_FairQueue`), a third
for each need, for which it does not wait until the others' excess is paid: so heads are parsed, which may bring a key,
and the server's health is told, whatever crowd asks for anything else. Whoever asks without end waits, and the kernel
stops him when its buffers are full.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Final, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.httpserver.transport.metered import Metered
from moeserve.httpserver.transport.request_state import state_of

SHARE: Final = 0.1  # of the thread's time, for strangers while answers are under way
BURST_S: Final = 0.05  # of the thread's time, saved up while there are none
# The most debt that costly requests leave: a fifth of a second until the next stranger's turn.
MAX_DEBT_S: Final = 0.02
# The shortest wait for the debt to be paid: rounded, a shorter one might pay nothing.
LEAST_WAIT_S: Final = 0.0002
SLICE_S: Final = 0.002  # of the thread's time until the loop has its turn; strangers have half of it
MOST_BEGUN: Final = 8  # requests begun before the loop's turn; one of a stranger's
SLACK: Final = 64  # entries of a queue whose connections have closed
READ_S: Final = 20e-6  # seconds of a read that the loop has done, and of a byte of it
BYTE_S: Final = 0.2e-9

RawHeaders = Sequence[tuple[bytes, bytes]]


class Need(Enum):
    """What a connection's turn is for."""

    PARSE = 0
    PROBE = 1  # to begin a request for the server's health
    BEGIN = 2  # to begin another, or to drop what comes behind a refusal


class Account:
    """What a connection has used up of the event loop's time, in seconds."""

    def __init__(self, *, is_trusted: bool = False) -> None:
        self._is_trusted = (
            is_trusted  # its last request was no stranger's, or it has had none and requests need no key
        )
        self._request_is_admitted = False  # the request that is being answered is no stranger's
        self._of_request = 0.0
        self.due = dict.fromkeys(Need, 0.0)  # when its next turn is due, by the clock of each need's queue
        self.need = Need.PARSE  # the need that its last turn was for

    @property
    def is_strangers(self) -> bool:
        return not (self._is_trusted or self._request_is_admitted)

    def begin_request(self, *, may_be_trusted: bool = False) -> None:
        self._of_request, self._request_is_admitted = 0.0, False
        self._is_trusted &= may_be_trusted

    def end_request(self) -> None:
        self._is_trusted = self._request_is_admitted

    def charge(self, seconds: float) -> float:
        """Charges the connection with the seconds that its request took. Returns what counts as strangers' time:
        all of it, or 0 for an admitted request."""
        if self._request_is_admitted:
            return 0.0
        self._of_request += seconds
        self.due[self.need] += seconds
        return seconds

    def admit(self) -> float:
        """Marks the request being answered as admitted, no longer a stranger's. Returns the seconds charged for it
        so far, which are refunded."""
        if self._request_is_admitted:
            return 0.0
        self._request_is_admitted = True
        self.due[self.need] -= self._of_request
        return self._of_request


class Waiting(Protocol):
    """A connection that has something to do."""

    account: Account

    @property
    @abstractmethod
    def need(self) -> Need: ...

    @abstractmethod
    def take_turn(self) -> bool:
        """Takes its turn, and asks again if there is more to do. Returns whether a request has begun."""


class _FairQueue:
    """Strangers with the same need, ordered by when their turns are due.

    The clock is the due time of the last turn. A connection's next turn is due later by the time that it has used up; a
    connection that has not asked for long is due at once. The clock also advances by itself, at a quarter of the rate
    at which each asking connection is served: else a crowd of ever new connections, which have used up nothing, would
    keep out one that has used up a little."""

    def __init__(self, need: Need) -> None:
        self.used = 0.0  # of the thread's time, by all turns
        self.debt = 0.0  # the part of it beyond this queue's third of strangers' share
        self._need = need
        self._clock = 0.0
        self._heap: list[tuple[float, int, Waiting]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, place: int, connection: Waiting) -> None:
        dues = connection.account.due
        due = dues[self._need] = max(dues[self._need], self._clock)
        heapq.heappush(self._heap, (due, place, connection))

    def pop(self) -> tuple[int, Waiting]:
        """Raises IndexError."""
        due, place, connection = heapq.heappop(self._heap)
        self._clock = max(self._clock, due)
        return place, connection

    def charge(self, seconds: float) -> None:
        self.used += seconds
        self.debt = min(self.debt + seconds, MAX_DEBT_S)
        self._clock += seconds / (4 * max(1, len(self._heap)))

    def drop_left(self, asking: Mapping[Waiting, int]) -> None:
        """Drops entries that no longer count, when they are the majority."""
        if len(self._heap) > 2 * len(asking) + SLACK:
            self._heap = [entry for entry in self._heap if asking.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)


class Turns:
    """The turns of one listening port."""

    def __init__(
        self,
        *,
        is_busy: Callable[[], bool] = lambda: True,
        is_known: Callable[[RawHeaders], bool] = lambda headers: False,
        is_open: bool = False,
        share: float = SHARE,
    ) -> None:
        """`is_busy`: answers are under way, beside which strangers get no more than `share`. `is_known`: headers have a
        key, so their request begins at once. `is_open`: requests need no key, and a POST begins at once if it is a
        connection's first, or if the one before reached the engine."""
        self.is_known = is_known
        self.is_open = is_open
        self._share = share
        self._is_busy = is_busy
        self._places = itertools.count()
        # To their current entries; a connection's older entries no longer count.
        self._asking: dict[Waiting, int] = {}
        self._admitted: deque[tuple[int, Waiting]] = deque()
        self._strangers = {need: _FairQueue(need) for need in Need}
        self._used = 0.0  # seconds that the queue of the last turn has used
        self._debt = -BURST_S  # strangers' time beyond their share
        self._paid_at = time.monotonic()
        self._next_run: asyncio.Handle | None = None

    def ask(self, connection: Waiting) -> None:
        """`connection` gets a turn. It may have asked for it already."""
        if connection in self._asking:
            return
        if self._queue(connection) or self._next_run is None:
            self._schedule()

    def _queue(self, connection: Waiting) -> bool:
        """Queues the connection; an entry that it has already no longer counts. Returns whether it may come before all
        that wait."""
        place = self._asking[connection] = next(self._places)
        if not connection.account.is_strangers:
            self._admitted.append((place, connection))
            return True
        queue = self._strangers[connection.need]
        is_first = not queue
        if is_first:
            queue.used = max(queue.used, self._used)
        queue.add(place, connection)
        return is_first

    def forget(self, connection: Waiting) -> None:
        """Forgets a connection that is closed."""
        self._asking.pop(connection, None)
        for queue in self._strangers.values():
            queue.drop_left(self._asking)

    def charge(self, connection: Waiting, seconds: float) -> None:
        strangers = connection.account.charge(seconds)
        if strangers:
            # For the time that has passed, this turn's included; what is charged now must be waited for.
            self._pay()
            self._debt = min(self._debt + strangers, MAX_DEBT_S)
            self._strangers[connection.account.need].charge(strangers)
            if connection in self._asking and connection.need is connection.account.need:
                self._queue(connection)

    def admit(self, connection: Waiting) -> None:
        """Notes that the request of `connection` is no stranger's."""
        self._debt -= connection.account.admit()
        if connection in self._asking:
            self._queue(connection)
        if self._asking:
            self._schedule()

    async def metered(
        self, app: ASGIApp, connection: Waiting, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs `app`; what it takes is charged to `connection`."""
        state_of(scope).admit = partial(self.admit, connection)
        await Metered(app(scope, receive, send).__await__(), partial(self.charge, connection))

    # ------------------------------------------------------------ turns

    def _schedule(self) -> None:
        if self._next_run is not None:
            self._next_run.cancel()
        loop = asyncio.get_running_loop()
        if self._admitted or self._strangers_turns():
            self._next_run = loop.call_soon(self._run)
        else:
            own = min((queue.debt for queue in self._strangers.values() if queue), default=math.inf)
            wait = min(self._debt, own * len(self._strangers)) / self._share
            self._next_run = loop.call_later(max(wait, LEAST_WAIT_S), self._run)

    def _strangers_turns(self) -> list[_FairQueue]:
        """The queues that may have the next turn."""
        is_over_share = self._debt > 0 and self._is_busy()
        return [
            queue for queue in self._strangers.values() if queue and (queue.debt <= 0 or not is_over_share)
        ]

    def _run(self) -> None:
        self._next_run = None
        self._pay()
        begun = 0
        until = time.thread_time() + SLICE_S
        while not begun and time.thread_time() < until - SLICE_S / 2:
            if (connection := self._next_stranger()) is None:
                break
            begun += self._take_turn(connection)
        while begun < MOST_BEGUN and time.thread_time() < until:
            if (connection := self._next_admitted()) is None:
                break
            begun += self._take_turn(connection)
        if self._asking:
            self._schedule()

    def _pay(self) -> None:
        now = time.monotonic()
        paid = self._share * (now - self._paid_at)
        self._debt = max(self._debt - paid, -BURST_S)
        for queue in self._strangers.values():
            queue.debt = max(queue.debt - paid / len(self._strangers), 0.0)
        self._paid_at = now

    def _take_turn(self, connection: Waiting) -> bool:
        connection.account.need = connection.need
        before = time.thread_time()
        has_begun = connection.take_turn()
        self.charge(connection, time.thread_time() - before)
        return has_begun

    def _next_stranger(self) -> Waiting | None:
        while queues := self._strangers_turns():
            queue = min(queues, key=lambda queue: queue.used)
            self._used = max(self._used, queue.used)
            place, connection = queue.pop()
            if self._takes(place, connection):
                return connection
        return None

    def _next_admitted(self) -> Waiting | None:
        while self._admitted:
            place, connection = self._admitted.popleft()
            if self._takes(place, connection):
                return connection
        return None

    def _takes(self, place: int, connection: Waiting) -> bool:
        """Whether the entry is the connection's current one. Then the connection no longer asks."""
        if self._asking.get(connection) != place:
            return False
        del self._asking[connection]
        return True

"""Connections take turns on the event loop. This module decides whose bytes are parsed next, and which request begins.

All connections and answers share one thread. In a turn, a slice of one connection's bytes is parsed (`held_input.py`)
or a request begins; between turns the loop writes answers.

A request without a key that does not reach the engine is unadmitted: a refusal, a probe, a web page. While answers are
in progress, all unadmitted requests together get at most SHARE of the thread's time, and those that are not probes at
most half of that. A part of that share is reserved for each need (`Need`), and connections with the same need share it
equally (`_FairQueue`). So many connections with one need do not delay the other needs: heads, which may bring a key,
are still parsed, and health probes are answered. A connection that always asks for turns waits for them, and the kernel
stops its sender when the socket's buffers are full.
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

SHARE: Final = 0.1  # of the thread's time, for unadmitted requests while answers are in progress
# The part of SHARE for unadmitted requests other than probes. On a machine with few cores, this time is taken from the
# engine.
UNPROBING_SHARE: Final = 0.05
BURST_S: Final = 0.05  # the most unused share that is saved up while there are no unadmitted requests
# The most debt after a costly request. At the rate SHARE it is paid in a fifth of a second.
MAX_DEBT_S: Final = 0.02
# The most debt of a need whose turns are all cheap: at its reserved part of SHARE it is paid in 60 to 80 ms.
MAX_CHEAP_DEBT_S: Final = 0.002
# The shortest wait for debt to be paid: a shorter one might be rounded to nothing.
LEAST_WAIT_S: Final = 0.0002
# The seconds of turns after which the loop does its other work. Unadmitted requests get half of these seconds.
SLICE_S: Final = 0.002
MOST_BEGUN: Final = 8  # requests begun before the loop does its other work; at most one of them unadmitted
SLACK: Final = 64  # entries of closed connections that a queue may keep
READ_S: Final = 20e-6  # estimated cost in seconds of a socket read, and of each byte of it
BYTE_S: Final = 0.2e-9
PARSED_BYTE_S: Final = 20e-9  # estimated cost in seconds of parsing a byte of a head, at most
CONNECTION_S: Final = 250e-6  # estimated cost in seconds of accepting a connection and closing it

RawHeaders = Sequence[tuple[bytes, bytes]]


class Need(Enum):
    """The purpose of a connection's turn."""

    PARSE = 0
    PROBE = 1  # to begin a health probe
    BEGIN = 2  # to begin any other request, or to drop bytes after a refusal

    @property
    def reserved_share(self) -> float:
        """Returns the share of the thread's time that no other need takes from it."""
        return SHARE / 3 if self is Need.PROBE else UNPROBING_SHARE / 2


class _Budget:
    """A share of the thread's time: seconds that were used beyond it are debt, which is paid as time passes."""

    def __init__(self, share: float, max_debt: float, saved: float = 0.0) -> None:
        """max_debt: seconds of debt beyond which use is forgiven. saved: the most unused seconds that are kept, all of
        which are there at first."""
        self._share = share
        self._max_debt = max_debt
        self._saved = saved
        self._debt = -saved

    @property
    def wait_s(self) -> float:
        """Returns the seconds until the debt is paid."""
        return max(self._debt, 0.0) / self._share

    def charge(self, seconds: float) -> None:
        self._debt = min(self._debt + seconds, self._max_debt)

    def refund(self, seconds: float) -> None:
        self._debt -= seconds

    def pay(self, passed: float) -> None:
        self._debt = max(self._debt - self._share * passed, -self._saved)


class Account:
    """A connection's use of the event loop's time, in seconds."""

    def __init__(self, *, is_trusted: bool = False) -> None:
        self._is_trusted = (
            # The connection's last request was admitted; or it has had no request, and no key is needed.
            is_trusted
        )
        self._request_is_admitted = False  # the request being answered
        self._of_request = 0.0
        self.due = dict.fromkeys(Need, 0.0)  # due time of its next turn, on the clock of each need's queue
        self.need = Need.PARSE  # the need of its last turn

    @property
    def is_unadmitted(self) -> bool:
        return not (self._is_trusted or self._request_is_admitted)

    def begin_request(self, *, may_be_trusted: bool = False) -> None:
        self._of_request, self._request_is_admitted = 0.0, False
        self._is_trusted &= may_be_trusted

    def end_request(self) -> None:
        self._is_trusted = self._request_is_admitted

    def charge(self, seconds: float) -> float:
        """Charges the connection for its request's seconds. Returns the seconds that count as unadmitted:
        all of them, or 0 for an admitted request."""
        if self._request_is_admitted:
            return 0.0
        self._of_request += seconds
        self.due[self.need] += seconds
        return seconds

    def admit(self) -> float:
        """Marks the request being answered as admitted. Returns the seconds charged for it so far, which are
        refunded."""
        if self._request_is_admitted:
            return 0.0
        self._request_is_admitted = True
        self.due[self.need] -= self._of_request
        return self._of_request


class Waiting(Protocol):
    """A connection that may wait for a turn."""

    account: Account

    @property
    @abstractmethod
    def need(self) -> Need: ...

    @property
    @abstractmethod
    def expected_s(self) -> float:
        """Returns the estimated cost of its next turn in seconds, as far as it is known before."""

    @abstractmethod
    def take_turn(self) -> bool:
        """Takes its turn, and asks again if there is more to do. Returns whether a request has begun."""


class _FairQueue:
    """The waiting unadmitted connections that have one need, ordered by the due time of their next turn.

    Of turns that are due at the same time the cheapest comes first: a small head is not kept waiting by large ones.

    The queue's clock is the due time of the last turn that was given. The time that a connection uses in a turn delays
    the due time of its next turn; a connection that has not asked for a while is due at once. The clock also advances
    by itself, at a quarter of the rate at which each waiting connection is served. Otherwise a stream of new
    connections, which have used no time, would keep out a connection that has used a little."""

    def __init__(self, need: Need) -> None:
        self.used = 0.0  # seconds of the thread's time, in all turns
        self.reserved = _Budget(need.reserved_share, MAX_DEBT_S if need is Need.BEGIN else MAX_CHEAP_DEBT_S)
        self.need = need
        self._clock = 0.0
        # When the turn is expected to end; the entry's place; the connection; when the turn is due.
        self._heap: list[tuple[float, int, Waiting, float]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, place: int, connection: Waiting) -> None:
        dues = connection.account.due
        due = dues[self.need] = max(dues[self.need], self._clock)
        heapq.heappush(self._heap, (due + connection.expected_s, place, connection, due))

    def pop(self) -> tuple[int, Waiting]:
        """Returns the place and the connection whose turn it is. Raises IndexError if none waits."""
        _, place, connection, due = heapq.heappop(self._heap)
        self._clock = max(self._clock, due)
        return place, connection

    def charge(self, seconds: float) -> None:
        self.used += seconds
        self.reserved.charge(seconds)
        self._clock += seconds / (4 * max(1, len(self._heap)))

    def drop_left(self, asking: Mapping[Waiting, int]) -> None:
        """Drops outdated entries if they are the majority."""
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
    ) -> None:
        """is_busy: whether answers are in progress; unadmitted requests then get no more than their shares.
        is_known: whether headers have a known key; such a request begins at once. is_open: requests need no key; then
        a POST begins at once if it is the connection's first, or if the connection's last request reached the
        engine."""
        self.is_known = is_known
        self.is_open = is_open
        self._is_busy = is_busy
        self._places = itertools.count()
        # The number of each connection's current entry; its older entries are outdated.
        self._asking: dict[Waiting, int] = {}
        self._admitted: deque[tuple[int, Waiting]] = deque()
        self._unadmitted = {need: _FairQueue(need) for need in Need}
        self._used = 0.0  # seconds that the queue of the last turn has used
        self._shared = _Budget(SHARE, MAX_DEBT_S, BURST_S)  # by all unadmitted requests
        self._unprobing = _Budget(UNPROBING_SHARE, MAX_DEBT_S, BURST_S)  # shared by those that do not probe
        self._paid_at = time.monotonic()
        self._next_run: asyncio.Handle | None = None

    def ask(self, connection: Waiting) -> None:
        """Queues `connection` for a turn. It may be queued already."""
        if connection in self._asking:
            return
        if self._queue(connection) or self._next_run is None:
            self._schedule()

    def _queue(self, connection: Waiting) -> bool:
        """Queues the connection; its earlier entry becomes outdated. Returns whether its turn may come before those of
        all waiting connections."""
        place = self._asking[connection] = next(self._places)
        if not connection.account.is_unadmitted:
            self._admitted.append((place, connection))
            return True
        queue = self._unadmitted[connection.need]
        is_first = not queue
        if is_first:
            queue.used = max(queue.used, self._used)
        queue.add(place, connection)
        return is_first

    def forget(self, connection: Waiting) -> None:
        """Forgets a connection that is closed."""
        self._asking.pop(connection, None)
        for queue in self._unadmitted.values():
            queue.drop_left(self._asking)

    def charge(self, connection: Waiting, seconds: float, need: Need | None = None) -> None:
        """Charges the connection for seconds of the thread's time. need: what they were for; None: its last turn's."""
        if need is not None:
            connection.account.need = need
        unadmitted = connection.account.charge(seconds)
        if unadmitted:
            # The passed time, including this turn's, reduces the debt before this turn's cost is added.
            self._pay()
            for budget in self._budgets(connection.account.need):
                budget.charge(unadmitted)
            self._unadmitted[connection.account.need].charge(unadmitted)
            if connection in self._asking and connection.need is connection.account.need:
                self._queue(connection)

    def admit(self, connection: Waiting) -> None:
        """Notes that the request of `connection` has reached the engine, so it is admitted."""
        refunded = connection.account.admit()
        for budget in self._budgets(connection.account.need):
            budget.refund(refunded)
        if connection in self._asking:
            self._queue(connection)
        if self._asking:
            self._schedule()

    async def metered(
        self, app: ASGIApp, connection: Waiting, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs `app` and charges its CPU time to `connection`."""
        state_of(scope).admit = partial(self.admit, connection)
        await Metered(app(scope, receive, send).__await__(), partial(self.charge, connection))

    # ------------------------------------------------------------ turns

    def _schedule(self) -> None:
        if self._next_run is not None:
            self._next_run.cancel()
        loop = asyncio.get_running_loop()
        if self._admitted or self._unadmitted_turns():
            self._next_run = loop.call_soon(self._run)
        else:
            wait = min(
                (self._wait_s(queue) for queue in self._unadmitted.values() if queue), default=math.inf
            )
            self._next_run = loop.call_later(max(wait, LEAST_WAIT_S), self._run)

    def _unadmitted_turns(self) -> list[_FairQueue]:
        """Returns the queues of unadmitted connections that may get the next turn."""
        is_bounded = self._is_busy()
        return [
            queue for queue in self._unadmitted.values() if queue and not (is_bounded and self._wait_s(queue))
        ]

    def _budgets(self, need: Need) -> tuple[_Budget, ...]:
        """Returns the budgets that the need shares with other needs."""
        return (self._shared,) if need is Need.PROBE else (self._shared, self._unprobing)

    def _wait_s(self, queue: _FairQueue) -> float:
        """Returns the seconds until the queue may get a turn: from what is reserved for it, or from what is shared."""
        return min(queue.reserved.wait_s, max(budget.wait_s for budget in self._budgets(queue.need)))

    def _run(self) -> None:
        self._next_run = None
        self._pay()
        begun = 0
        until = time.thread_time() + SLICE_S
        while not begun and time.thread_time() < until - SLICE_S / 2:
            if (connection := self._next_unadmitted()) is None:
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
        for budget in (
            self._shared,
            self._unprobing,
            *(queue.reserved for queue in self._unadmitted.values()),
        ):
            budget.pay(now - self._paid_at)
        self._paid_at = now

    def _take_turn(self, connection: Waiting) -> bool:
        connection.account.need = connection.need
        before = time.thread_time()
        has_begun = connection.take_turn()
        self.charge(connection, time.thread_time() - before)
        return has_begun

    def _next_unadmitted(self) -> Waiting | None:
        while queues := self._unadmitted_turns():
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
        """Returns whether the entry is the connection's current one; if so, removes it."""
        if self._asking.get(connection) != place:
            return False
        del self._asking[connection]
        return True

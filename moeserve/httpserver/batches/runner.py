"""BatchRunner answers the lines of all batches in the background. It answers at most as many lines at once as the
engine has request slots.

Batches of different API keys take turns, line by line; batches of the same key are answered one after another. For the
router each line is a background request, so other requests come first. A line is done when its result is on the disk;
after a crash, the next server answers all other lines again.

If a model's server ends while it answers lines, these lines are tried again one after another, each at most MOST_LOSSES
times. So only a line that itself ends servers reaches that count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Protocol

from moeserve.httpserver.batches.batch_in_progress import BatchInProgress
from moeserve.httpserver.batches.disk_wait import DiskWait
from moeserve.httpserver.batches.input_lines import Line
from moeserve.httpserver.batches.line_pace import LinePace
from moeserve.httpserver.batches.line_request import Answered
from moeserve.httpserver.batches.outcomes import Kind, Outcome
from moeserve.httpserver.batches.store import BatchStore
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.keys import ApiKeys

log = logging.getLogger(__name__)

MOST_AT_ONCE: Final = 256  # most lines answered at once
LOCK_INTERVAL_S: Final = 0.5
TICK_S: Final = 1.0  # interval of checks for expired and late batches
SWEEP_S: Final = 600.0
MOST_WAIT_S: Final = 10  # longest wait before a line that the server could not take is sent again
MOST_LOSSES: Final = 3  # servers that may end over a line; then the line fails
DISK_WAIT_S: Final = 5.0  # wait before a result is written again after the disk was full


class BatchCounts(Protocol):
    """The metrics that count requests of batches."""

    @abstractmethod
    def batch_request(self, outcome: str) -> None: ...

    @abstractmethod
    def batch_requests_left(self, count: int) -> None: ...


class BatchServer(Protocol):
    """The server around the runner: one model's, or the front of several."""

    keys: ApiKeys | None
    counts: BatchCounts
    most_at_once: int  # lines

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """True while other answers are in progress."""

    @property
    @abstractmethod
    def knows_its_models(self) -> bool: ...

    @abstractmethod
    def has_model(self, name: str) -> bool: ...

    @abstractmethod
    async def answer(self, path: str, body: Mapping[str, Any], tenant: str, owner: str) -> Answered:
        """Answers one line of a batch as its route does, and returns the answer's status and body. tenant, owner: the
        tenant and the owner of the batch's API key (see `RequestState`)."""


class BatchRunner:
    def __init__(self, server: BatchServer, store: BatchStore) -> None:
        self._server = server
        self._store = store
        self._pace = LinePace(lambda: server.is_busy)
        self._most = min(server.most_at_once, MOST_AT_ONCE)
        self._running: dict[str, BatchInProgress] = {}  # by id, in the order of creation
        self._lines: dict[asyncio.Task[None], BatchInProgress] = {}
        self._asking: set[asyncio.Task[None]] = set()  # the tasks in `_lines` that have no outcome yet
        self._is_stopping = False
        self._turns: deque[str] = deque()  # owners, the next one first
        self._wake = asyncio.Event()
        self._swept_at = time.monotonic()
        self._disk_wait = DiskWait()
        self._folder_failure = ""  # why the last round failed; empty: it did not
        self._trying = asyncio.Lock()  # held by the line that may be the cause of a server's end

    async def run(self) -> None:
        """Runs until it is cancelled, and then releases the folder for another server. Raises ConfigError, OSError."""
        store = self._store
        try:
            while not await asyncio.to_thread(store.open):
                await asyncio.sleep(LOCK_INTERVAL_S)
            store.changed = self._wake.set
            while True:
                await self._round()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), min(self._pace.wait_s() or TICK_S, TICK_S))
                self._wake.clear()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        self._is_stopping = True
        for task in self._asking:
            task.cancel()
        if self._lines:
            await asyncio.wait(list(self._lines))
        for running in self._running.values():
            await running.close()
        self._store.close()

    async def _round(self) -> None:
        """Begins and ends batches, and starts lines while there are free places."""
        try:
            await self._begin_new()
            for running in list(self._running.values()):
                await self._end_if_done(running)
            if time.monotonic() - self._swept_at > SWEEP_S:
                self._swept_at = time.monotonic()
                await self._store.sweep()
        except (ApiError, OSError) as error:
            if str(error) != self._folder_failure:
                self._folder_failure = str(error)
                log.error("batches wait, because their folder failed: %s", error)
            return
        if self._folder_failure:
            self._folder_failure = ""
            log.info("batches go on: their folder works again")
        left = sum(len(running.pending) + running.num_open for running in self._running.values())
        self._server.counts.batch_requests_left(left)
        while self._may_begin() and (found := self._next()) is not None:
            running, line = found
            task = asyncio.create_task(self._pace.begin(self._answer(running, line)))
            self._lines[task] = running
            running.num_open += 1
            task.add_done_callback(self._line_ended)

    def _may_begin(self) -> bool:
        return len(self._lines) < self._most and not self._pace.wait_s()

    async def _begin_new(self) -> None:
        for batch in list(self._store.batches.values()):
            if batch.is_ended or batch.id in self._running:
                continue
            if not self._server.knows_its_models:
                return
            running = await BatchInProgress.begin(self._store, batch, self._server.has_model)
            if running is not None:
                self._running[batch.id] = running
                if batch.owner not in self._turns:
                    self._turns.append(batch.owner)

    async def _end_if_done(self, running: BatchInProgress) -> None:
        batch = running.batch
        is_late = time.time() >= batch.expires_at
        if is_late or batch.status == "cancelling":
            running.takes_no_more = True
            for task in self._asking:
                if self._lines[task] is running:
                    task.cancel()
            if running.pending and not running.num_open:
                kind: Kind = "canceled" if batch.status == "cancelling" else "expired"
                await running.give_up(kind)
        if not running.pending and not running.num_open:
            del self._running[batch.id]
            await running.end()

    def _next(self) -> tuple[BatchInProgress, Line] | None:
        """Returns the next line of the owner whose turn it is."""
        for _ in range(len(self._turns)):
            owner = self._turns[0]
            self._turns.rotate(-1)
            mine = [one for one in self._running.values() if one.batch.owner == owner]
            if not mine:
                self._turns.remove(owner)
                continue
            for running in mine:
                if (line := running.take()) is not None:
                    return running, line
        return None

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        running = self._lines.pop(task)
        running.num_open -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a line of %s failed", running.batch.id, exc_info=error)
        self._wake.set()

    async def _answer(self, running: BatchInProgress, line: Line) -> None:
        """Answers a line and stores its result. If the call is cancelled before that, the line is pending again."""
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            outcome = await self._outcome(running, line)
        except BaseException:
            running.put_back(line)
            raise
        finally:
            self._asking.discard(task)
        if await self._keep(running, outcome):
            self._server.counts.batch_request(outcome.kind)

    async def _keep(self, running: BatchInProgress, outcome: Outcome) -> bool:
        """Stores a result, as soon as the disk takes it. Returns False if the server stops before that: the line then
        has no result, and the next server answers it again."""
        waits = False
        while True:
            try:
                await running.keep(outcome)
            except OSError as error:
                if waits:
                    self._disk_wait.again(error)
                else:
                    waits = True
                    self._disk_wait.begin(error)
            else:
                if waits:
                    self._disk_wait.end()
                return True
            if self._is_stopping:
                return False
            await asyncio.sleep(DISK_WAIT_S)

    async def _outcome(self, running: BatchInProgress, line: Line) -> Outcome:
        batch = running.batch
        body = await running.body_of(line)
        while True:
            tenant = self._tenant_of(batch.owner)
            answered = None
            if tenant is not None:
                alone = self._trying if running.is_suspect(line) else contextlib.nullcontext()
                async with alone:
                    answered = await self._server.answer(batch.endpoint, body, tenant, batch.owner)
                self._pace.add(answered.seconds_elsewhere)
            if answered is not None and answered.is_lost and await running.add_loss(line) < MOST_LOSSES:
                continue
            if answered is not None and answered.retry_after is None:
                return _outcome_of(line, answered)
            wait = MOST_WAIT_S if answered is None else min(answered.retry_after or 1, MOST_WAIT_S)
            await asyncio.sleep(wait)

    def _tenant_of(self, owner: str) -> str | None:
        """Returns the tenant of an API key's owner. Returns None if the server no longer knows the key; the key's
        batches then wait until the key is back, or expire."""
        keys = self._server.keys
        if not owner or not keys:
            return "" if not owner and not keys else None
        return keys.name_of_owner(owner)


def _outcome_of(line: Line, answered: Answered) -> Outcome:
    kind: Kind = "succeeded" if answered.status == 200 else "errored"
    return Outcome(line.custom_id, kind, answered.status, answered.body, answered.request_id)

"""Loads from disk: pages that continue what the prefix tree has of a waiting prompt.

A load has slots of its own, page by page, and a reference to the node that its pages continue, so that this is not
evicted meanwhile. At its end the tree takes the slots of all pages up to the first that failed, and the prompt finds
them there like any cached prefix. A load goes in windows of pages, and ends early where the disk turns out slower than
computing, or the pool has no room.

Of a model with recurrent state, the last that a load brings is the state at the end of its pages, without which the
prompt cannot continue from them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from moeserve.messages.pages import PageCopy, PageOrders, StateCopy
from moeserve.router.core.load_rate import LoadRate
from moeserve.router.core.radix_cache import RadixCache
from moeserve.router.core.radix_node import TOKEN_BYTES, Node
from moeserve.router.core.request import Request
from moeserve.router.core.state_memory import StateMemory

FIRST_WINDOW = 4  # pages, while the disk's rate is unknown
WINDOW_MS = (
    2000.0  # of reading at the measured rate; more than a step takes, so that the disk does not wait for one
)
LEAST_PATIENCE_S = 2.0  # without any page, after which the waiting prompt is computed instead
PATIENCE = 2.0  # times what computing the rest takes


@dataclass(frozen=True, slots=True)
class TierSizes:
    page_tokens: int
    page_bytes: int
    state_bytes: int  # of a recurrent state
    max_running: int  # requests, each of which has a state


@dataclass(slots=True, eq=False)
class LoadJob:
    waiters: list[Request]  # the first began it
    tokens: bytes  # from the first page on, int32
    keys: list[bytes]  # of its pages, and of the state behind them
    start: int  # the first page's position
    node: Node  # referenced; the pages follow its end
    usable: int  # tokens that the prompt would find in the cache without it
    has_state: bool
    progress_at: float  # seconds: when a page came, or the first was ordered
    slots: array[int] = field(default_factory=lambda: array("i"))  # of the pages ordered so far
    state_slot: int | None = None  # once the state is ordered
    landed: set[int] = field(default_factory=set)  # of `keys`, those that are there
    num_ordered: int = 0
    num_answered: int = 0
    end: int = 0  # of `keys`, those up to here are wanted

    def __post_init__(self) -> None:
        self.end = len(self.keys)

    @property
    def num_pages(self) -> int:
        return len(self.keys) - self.has_state


class PageLoader:
    """The owner of the slots of loads. It takes them by `take`, from `available()`, and gives them up to the tree or to
    `free`."""

    def __init__(
        self,
        sizes: TierSizes,
        tree: RadixCache,
        states: StateMemory | None,
        take: Callable[[int], array[int]],
        free: Callable[[array[int]], None],
        available: Callable[[], int],
        rate: LoadRate,
    ) -> None:
        self._page_tokens = sizes.page_tokens
        self._page_bytes = sizes.page_bytes
        self._state_bytes = sizes.state_bytes
        self._max_running = sizes.max_running
        self._tree = tree
        self._states = states  # None: the model has none
        self._take = take
        self._free = free
        self._available = available
        self._rate = rate
        self._jobs: list[LoadJob] = []
        self._under_way: dict[
            bytes, tuple[LoadJob, int]
        ] = {}  # by key: the page of an order not answered yet
        self.num_tokens = 0  # that the tree got

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def slots(self) -> Iterator[array[int]]:
        """Those of all loads."""
        return (job.slots for job in self._jobs)

    def join(self, request: Request, key: bytes) -> bool:
        """Has a request wait for the page or the state of this key, if a load will bring it."""
        for job in self._jobs:
            if key in job.keys[: job.end] and job.waiters:
                job.waiters.append(request)
                return True
        return False

    def begin(self, job: LoadJob) -> None:
        """`job.node` is referenced for it, and none of its pages is under way."""
        self._jobs.append(job)

    def is_under_way(self, key: bytes) -> bool:
        return key in self._under_way

    def leave(self, request: Request) -> None:
        """A request no longer waits. A load for nobody orders no further pages."""
        for job in self._jobs:
            if request in job.waiters:
                job.waiters.remove(request)
                if not job.waiters:
                    self._stop(job)

    def orders(self, recompute_ms: Callable[[int, int], float]) -> PageOrders:
        """The next windows of all loads. recompute_ms: what computing tokens takes, by position and number."""
        orders = PageOrders([], [], [], [])
        for job in self._jobs:
            self._window(job, orders, recompute_ms)
        return orders

    def _window(self, job: LoadJob, orders: PageOrders, recompute_ms: Callable[[int, int], float]) -> None:
        rate = self._rate.bytes_per_ms
        most = FIRST_WINDOW if rate is None else max(FIRST_WINDOW, int(rate * WINDOW_MS) // self._page_bytes)
        count = min(most - len(self._under_way), job.end - job.num_ordered)
        if count <= 0:
            return
        if not self._rate.pays(self.bytes_left(job), recompute_ms(*self._tokens_left(job))):
            self._stop(job)
            return
        pages = min(count, job.num_pages - job.num_ordered)
        if pages > 0:
            self._order_pages(job, pages, orders.loads)
        else:
            self._order_state(job, orders.state_loads)

    def bytes_left(self, job: LoadJob) -> int:
        """Of what a load has not ordered yet."""
        pages = min(job.end, job.num_pages) - job.num_ordered
        return max(pages, 0) * self._page_bytes + self._state_bytes * (job.end > job.num_pages)

    def _tokens_left(self, job: LoadJob) -> tuple[int, int]:
        """Position and number of those that are computed where a load stops now: with a state to come, all."""
        start = job.usable
        if not job.has_state:
            start = max(start, job.start + job.num_ordered * self._page_tokens)
        return start, job.start + min(job.end, job.num_pages) * self._page_tokens - start

    def _order_pages(self, job: LoadJob, count: int, orders: list[PageCopy]) -> None:
        step = self._page_tokens
        count = min(count, self._available() // step)
        if count == 0:
            if job.num_answered == job.num_ordered:
                self._stop(job)  # others need the pool
            return
        slots = self._take(count * step)
        for index in range(count):
            key = self._ordered(job)
            orders.append(PageCopy(key, slots[index * step : (index + 1) * step].tobytes()))
        job.slots.extend(slots)

    def _order_state(self, job: LoadJob, orders: list[StateCopy]) -> None:
        assert self._states is not None
        job.state_slot = self._states.take_for_load(self._max_running)
        if job.state_slot is None:
            self._stop(job)
        else:
            orders.append(StateCopy(self._ordered(job), job.state_slot))

    def _ordered(self, job: LoadJob) -> bytes:
        """The key of the next page, or of the state, which is ordered."""
        key = job.keys[job.num_ordered]
        self._under_way[key] = job, job.num_ordered
        job.num_ordered += 1
        return key

    @staticmethod
    def _stop(job: LoadJob) -> None:
        """No further page is ordered."""
        job.end = min(job.end, job.num_ordered)

    def answered(self, key: bytes, now: float, *, is_there: bool) -> bool:
        """The worker has loaded a page or a state, or failed to; whether it is a state."""
        job, page = self._under_way.pop(key)
        job.num_answered += 1
        if is_there:
            job.landed.add(page)
            job.progress_at = now
        else:
            job.end = min(job.end, page)
        return page == job.num_pages

    def finish(self, now: float, recompute_ms: Callable[[int, int], float]) -> list[Request]:
        """Ends the loads that are complete; returns the requests that need not wait any longer. Called after all of a
        report was told to `answered`."""
        ended: list[Request] = []
        for job in list(self._jobs):
            if job.num_answered == job.num_ordered >= job.end:
                ended += self._end(job)
            elif job.waiters and self._is_late(job, now, recompute_ms):
                ended += job.waiters
                job.waiters = []
                self._stop(job)
        return ended

    def _is_late(self, job: LoadJob, now: float, recompute_ms: Callable[[int, int], float]) -> bool:
        if job.has_state:
            start, left = job.usable, job.start + job.num_pages * self._page_tokens - job.usable
        else:
            start, left = job.start, (len(job.keys) - len(job.landed)) * self._page_tokens
        computing_s = recompute_ms(start, left) / 1e3
        return now - job.progress_at > max(LEAST_PATIENCE_S, PATIENCE * computing_s)

    def _end(self, job: LoadJob) -> list[Request]:
        """Gives the tree what has come."""
        self._jobs.remove(job)
        count = 0
        while count in job.landed:
            count += 1
        end = min(count, job.num_pages) * self._page_tokens
        surplus, node = self._tree.release(job.node, job.tokens[: end * TOKEN_BYTES], job.slots[:end])
        self._free(surplus)
        self._free(job.slots[end:])
        is_whole = count == len(job.keys)
        self._end_state(job, node if is_whole else None)
        loaded = 0 if job.has_state and not is_whole else max(job.start + end - job.usable, 0)
        self.num_tokens += loaded
        for request in job.waiters:
            request.disk_tokens += loaded
        return job.waiters

    def _end_state(self, job: LoadJob, node: Node | None) -> None:
        if job.state_slot is not None:
            assert self._states is not None
            self._states.loaded(job.state_slot, job.start + job.num_pages * self._page_tokens, node)

    def reset(self) -> None:
        """The worker is lost, and nothing is under way any more."""
        for job in self._jobs:
            self._tree.release(job.node, b"", array("i"))
            self._free(job.slots)
            self._end_state(job, None)
        self._jobs.clear()
        self._under_way.clear()

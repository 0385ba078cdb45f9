"""Loads pages from the tiers that continue the cached prefix of a waiting prompt.

A load has its own slots. It references the tree node that its pages continue, so that the node is not evicted
meanwhile. At its end the slots of all pages up to the first failed one move into the tree, where the prompt finds them
like any cached prefix. A load orders a limited number of pages at a time. It ends early if the tiers turn out slower
than computing, or the pool is full.

In a model with recurrent state, the last item of a load is the state at the end of its pages, without which the
prompt cannot continue there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moeserve.messages.pages import PageCopy, PageOrders, StateCopy, Tier, TierCounts
from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import TOKEN_BYTES, Node
from moeserve.router.core.memory.state_memory import StateMemory
from moeserve.router.core.tiers.load_rate import LoadRates
from moeserve.router.core.tiers.tier_sizes import TierSizes

# pages ordered at once while the tier's rate is unknown
FIRST_WINDOWS: dict[Tier, int] = {"ram": 64, "disk": 4}
# Window size in time at the measured rate; longer than a step, so that the tier never idles.
WINDOW_MS = 2000.0
LEAST_PATIENCE_S = 2.0  # time without any page after which the waiting prompt is computed instead
PATIENCE = 2.0  # the same as a multiple of the time to compute the rest


@dataclass(slots=True, eq=False)
class LoadJob:
    waiters: list[HeldSequence]  # the first one started it
    tokens: bytes  # int32, from the first page on
    keys: list[bytes]  # of its pages, and of the state after them
    start: int  # position of the first page
    node: Node  # referenced; the pages continue it
    usable: int  # tokens that the prompt would find in the cache without the load
    has_state: bool
    progress_at: float  # seconds, when the last page arrived or the first was ordered
    slots: array[int] = field(default_factory=lambda: array("i"))  # slots of the pages ordered so far
    state_slot: int | None = None  # set when the state is ordered
    landed: dict[int, int] = field(default_factory=dict)  # index in `keys` of an arrived item → its tier
    num_ordered: int = 0
    num_answered: int = 0
    end: int = 0  # number of leading `keys` that are wanted

    def __post_init__(self) -> None:
        self.end = len(self.keys)

    @property
    def num_pages(self) -> int:
        return len(self.keys) - self.has_state


class PageLoader:
    """Owns the slots of loads: allocates them with `take` from `available()`, and passes them to the tree or to
    `free`."""

    def __init__(
        self,
        sizes: TierSizes,
        tree: RadixCache,
        states: StateMemory | None,
        take: Callable[[Sequence[int]], array[int]],
        free: Callable[[array[int]], None],
        available: Callable[[], int],
        rates: LoadRates,
        tier_of: Callable[[bytes], int],
        counts: Sequence[TierCounts],
    ) -> None:
        """tier_of: a function that returns the tier from which a page or state would be read. counts: the counters of
        each tier."""
        self._page_tokens = sizes.page_tokens
        self._page_bytes = sizes.page_bytes
        self._state_bytes = sizes.state_bytes
        self._max_running = sizes.max_running
        self._tiers = sizes.tiers
        self._tree = tree
        self._states = states  # None if the model has no recurrent state
        self._take = take
        self._free = free
        self._available = available
        self._rates = rates
        self._tier_of = tier_of
        self._jobs: list[LoadJob] = []
        # key → unanswered order: its load, the index in the load's keys, and the expected tier.
        self._under_way: dict[bytes, tuple[LoadJob, int, int]] = {}
        self._counts = counts

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def slots(self) -> Iterator[array[int]]:
        """Yields the slots of all loads."""
        return (job.slots for job in self._jobs)

    def tokens(self) -> Iterator[bytes]:
        """Yields the tokens (int32) that loads will add to the tree."""
        return (job.tokens for job in self._jobs)

    def join(self, request: HeldSequence, key: bytes) -> bool:
        """Makes a request wait for the page or state `key`, if a load will bring it. Returns whether it does."""
        for job in self._jobs:
            if key in job.keys[: job.end] and job.waiters:
                job.waiters.append(request)
                return True
        return False

    def begin(self, job: LoadJob) -> None:
        """Starts a load. The caller must have referenced its node, and no other load may have ordered any of its
        pages."""
        self._jobs.append(job)

    def is_under_way(self, key: bytes) -> bool:
        return key in self._under_way

    def leave(self, request: HeldSequence) -> None:
        """Ends a request's wait. A load for which no request waits any more orders no further pages."""
        for job in self._jobs:
            if request in job.waiters:
                job.waiters.remove(request)
                if not job.waiters:
                    self._stop(job)

    def orders(self, recompute_ms: Callable[[int, int], float]) -> PageOrders:
        """Returns the orders for the next windows of all loads. recompute_ms(position, count): milliseconds to
        compute tokens."""
        orders = PageOrders([], [], [], [])
        for job in self._jobs:
            self._window(job, orders, recompute_ms)
        return orders

    def _window(self, job: LoadJob, orders: PageOrders, recompute_ms: Callable[[int, int], float]) -> None:
        while job.num_ordered < job.end:
            tier = self._tier_of(job.keys[job.num_ordered])
            room = self._room(tier)
            if room <= 0:
                return
            if not self._rates.pays(self._bytes_left(job), recompute_ms(*self._tokens_left(job))):
                self._stop(job)
                return
            if job.num_ordered == job.num_pages:
                self._order_state(job, tier, orders.state_loads)
            elif not self._order_pages(job, tier, room, orders.loads):
                return

    def _room(self, tier: int) -> int:
        """Returns how many more pages of the tier may be on the way."""
        rate = self._rates.bytes_per_ms[tier]
        most = FIRST_WINDOWS[self._tiers[tier]]
        if rate is not None:
            most = max(most, int(rate * WINDOW_MS) // self._page_bytes)
        return most - sum(each == tier for _, _, each in self._under_way.values())

    def _bytes_left(self, job: LoadJob) -> list[int]:
        """Returns the bytes of a load that are not ordered yet, by tier."""
        return self.bytes_of(job.keys[job.num_ordered : job.end], with_state=job.end > job.num_pages)

    def bytes_of(self, keys: list[bytes], *, with_state: bool) -> list[int]:
        """Returns the bytes of pages by tier; with_state: the last key is a state's."""
        sizes = [0] * len(self._tiers)
        for index, key in enumerate(keys, 1):
            is_state = with_state and index == len(keys)
            sizes[self._tier_of(key)] += self._state_bytes if is_state else self._page_bytes
        return sizes

    def _tokens_left(self, job: LoadJob) -> tuple[int, int]:
        """Returns position and number of the tokens to compute if the load stopped now: all of them while its state
        is missing."""
        start = job.usable
        if not job.has_state:
            start = max(start, job.start + job.num_ordered * self._page_tokens)
        return start, job.start + min(job.end, job.num_pages) * self._page_tokens - start

    def _order_pages(self, job: LoadJob, tier: int, room: int, orders: list[PageCopy]) -> bool:
        """Orders the next pages from a tier. Returns False if the pool has no slots for them."""
        step = self._page_tokens
        rest = job.keys[job.num_ordered : min(job.end, job.num_pages)]
        run = next((at for at, key in enumerate(rest) if self._tier_of(key) != tier), len(rest))
        count = min(run, room, self._available() // step)
        if count == 0:
            if job.num_answered == job.num_ordered:
                self._stop(job)  # other requests need the pool
            return False
        first = job.start + job.num_ordered * step
        slots = self._take(range(first, first + count * step))
        for index in range(count):
            key = self._ordered(job, tier)
            orders.append(PageCopy(key, slots[index * step : (index + 1) * step].tobytes()))
        job.slots.extend(slots)
        return True

    def _order_state(self, job: LoadJob, tier: int, orders: list[StateCopy]) -> None:
        assert self._states is not None
        job.state_slot = self._states.take_for_load(self._max_running)
        if job.state_slot is None:
            self._stop(job)
        else:
            orders.append(StateCopy(self._ordered(job, tier), job.state_slot))

    def _ordered(self, job: LoadJob, tier: int) -> bytes:
        """Marks the next page, or the state, as ordered. Returns its key."""
        key = job.keys[job.num_ordered]
        self._under_way[key] = job, job.num_ordered, tier
        job.num_ordered += 1
        return key

    @staticmethod
    def _stop(job: LoadJob) -> None:
        """Orders no more pages of a load."""
        job.end = min(job.end, job.num_ordered)

    def answered(self, key: bytes, now: float, tier: int | None) -> bool:
        """Notes that the worker loaded a page or state from `tier`, or failed to (None). Returns whether it was a
        state. now: monotonic seconds."""
        job, page, _ = self._under_way.pop(key)
        job.num_answered += 1
        if tier is not None:
            job.landed[page] = tier
            job.progress_at = now
        else:
            job.end = min(job.end, page)
        return page == job.num_pages

    def finish(self, now: float, recompute_ms: Callable[[int, int], float]) -> list[HeldSequence]:
        """Ends the loads that are complete or late. Returns the requests that need not wait any longer. Call it after
        `answered` for the whole report. now: monotonic seconds."""
        ended: list[HeldSequence] = []
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

    def _end(self, job: LoadJob) -> list[HeldSequence]:
        """Moves the loaded pages into the tree. Returns the waiting requests."""
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
        by_tier = self._by_tier(job, count, loaded)
        for tier, tokens in enumerate(by_tier):
            self._counts[tier].tokens += tokens
        for request in job.waiters:
            for name, tokens in zip(self._tiers, by_tier, strict=True):
                request.tier_tokens[name] = request.tier_tokens.get(name, 0) + tokens
        return job.waiters

    def _by_tier(self, job: LoadJob, count: int, loaded: int) -> list[int]:
        """Splits `loaded` tokens by tier; the first `count` items of the load have arrived. A partial page counts
        for the last item's tier."""
        by_tier = [0] * len(self._tiers)
        if not loaded:
            return by_tier
        for page in range(min(count, job.num_pages)):
            by_tier[job.landed[page]] += self._page_tokens
        by_tier[job.landed[count - 1]] += loaded - sum(by_tier)
        return by_tier

    def _end_state(self, job: LoadJob, node: Node | None) -> None:
        if job.state_slot is not None:
            assert self._states is not None
            self._states.loaded(job.state_slot, job.start + job.num_pages * self._page_tokens, node)

    def reset(self) -> None:
        """Forgets all loads, after the worker was lost."""
        for job in self._jobs:
            self._tree.release(job.node, b"", array("i"))
            self._free(job.slots)
            self._end_state(job, None)
        self._jobs.clear()
        self._under_way.clear()

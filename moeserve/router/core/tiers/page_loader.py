"""Loads from the tiers behind the pool: pages that continue what the prefix tree has of a waiting prompt.

A load has slots of its own, page by page, and a reference to the node that its pages continue, so that this is not
evicted meanwhile. At its end the tree takes the slots of all pages up to the first that failed, and the prompt finds
them there like any cached prefix. A load goes in windows of pages, and ends early where its tiers turn out slower than
computing, or the pool has no room.

Of a model with recurrent state, the last that a load brings is the state at the end of its pages, without which the
prompt cannot continue from them.
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

FIRST_WINDOWS: dict[Tier, int] = {"ram": 64, "disk": 4}  # pages, while the tier's rate is unknown
# Of reading at the measured rate; more than a step takes, so that the tier does not wait for one.
WINDOW_MS = 2000.0
LEAST_PATIENCE_S = 2.0  # without any page, after which the waiting prompt is computed instead
PATIENCE = 2.0  # times what computing the rest takes


@dataclass(slots=True, eq=False)
class LoadJob:
    waiters: list[HeldSequence]  # the first began it
    tokens: bytes  # from the first page on, int32
    keys: list[bytes]  # of its pages, and of the state behind them
    start: int  # the first page's position
    node: Node  # referenced; the pages follow its end
    usable: int  # tokens that the prompt would find in the cache without it
    has_state: bool
    progress_at: float  # seconds: when a page came, or the first was ordered
    slots: array[int] = field(default_factory=lambda: array("i"))  # of the pages ordered so far
    state_slot: int | None = None  # once the state is ordered
    landed: dict[int, int] = field(default_factory=dict)  # of `keys`, those that are there: from which tier
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
        rates: LoadRates,
        tier_of: Callable[[bytes], int],
        counts: Sequence[TierCounts],
    ) -> None:
        """tier_of: the number of the tier that a page or a state would come from. counts: one for each tier."""
        self._page_tokens = sizes.page_tokens
        self._page_bytes = sizes.page_bytes
        self._state_bytes = sizes.state_bytes
        self._max_running = sizes.max_running
        self._tiers = sizes.tiers
        self._tree = tree
        self._states = states  # None: the model has none
        self._take = take
        self._free = free
        self._available = available
        self._rates = rates
        self._tier_of = tier_of
        self._jobs: list[LoadJob] = []
        # By key: the page of an order that is not answered yet, and the tier that it was expected from.
        self._under_way: dict[bytes, tuple[LoadJob, int, int]] = {}
        self._counts = counts

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def slots(self) -> Iterator[array[int]]:
        """Those of all loads."""
        return (job.slots for job in self._jobs)

    def tokens(self) -> Iterator[bytes]:
        """What the tree will have of all loads, int32."""
        return (job.tokens for job in self._jobs)

    def join(self, request: HeldSequence, key: bytes) -> bool:
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

    def leave(self, request: HeldSequence) -> None:
        """A request no longer waits. A load without a request orders no further pages."""
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
        """How many pages more the tier may have under way."""
        rate = self._rates.bytes_per_ms[tier]
        most = FIRST_WINDOWS[self._tiers[tier]]
        if rate is not None:
            most = max(most, int(rate * WINDOW_MS) // self._page_bytes)
        return most - sum(each == tier for _, _, each in self._under_way.values())

    def _bytes_left(self, job: LoadJob) -> list[int]:
        """Bytes that a load has not ordered yet, by tier."""
        return self.bytes_of(job.keys[job.num_ordered : job.end], with_state=job.end > job.num_pages)

    def bytes_of(self, keys: list[bytes], *, with_state: bool) -> list[int]:
        """Bytes of pages, and of a state that is the last of them, by tier."""
        sizes = [0] * len(self._tiers)
        for index, key in enumerate(keys, 1):
            is_state = with_state and index == len(keys)
            sizes[self._tier_of(key)] += self._state_bytes if is_state else self._page_bytes
        return sizes

    def _tokens_left(self, job: LoadJob) -> tuple[int, int]:
        """Position and number of those that are computed where a load stops now: with a state to come, all."""
        start = job.usable
        if not job.has_state:
            start = max(start, job.start + job.num_ordered * self._page_tokens)
        return start, job.start + min(job.end, job.num_pages) * self._page_tokens - start

    def _order_pages(self, job: LoadJob, tier: int, room: int, orders: list[PageCopy]) -> bool:
        """Orders the next pages of a tier; False: there is no room for them in the pool."""
        step = self._page_tokens
        rest = job.keys[job.num_ordered : min(job.end, job.num_pages)]
        run = next((at for at, key in enumerate(rest) if self._tier_of(key) != tier), len(rest))
        count = min(run, room, self._available() // step)
        if count == 0:
            if job.num_answered == job.num_ordered:
                self._stop(job)  # others need the pool
            return False
        slots = self._take(count * step)
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
        """The key of the next page, or of the state, which is ordered."""
        key = job.keys[job.num_ordered]
        self._under_way[key] = job, job.num_ordered, tier
        job.num_ordered += 1
        return key

    @staticmethod
    def _stop(job: LoadJob) -> None:
        """No further page is ordered."""
        job.end = min(job.end, job.num_ordered)

    def answered(self, key: bytes, now: float, tier: int | None) -> bool:
        """The worker has loaded a page or a state from this tier, or, for None, failed to; whether it is a state."""
        job, page, _ = self._under_way.pop(key)
        job.num_answered += 1
        if tier is not None:
            job.landed[page] = tier
            job.progress_at = now
        else:
            job.end = min(job.end, page)
        return page == job.num_pages

    def finish(self, now: float, recompute_ms: Callable[[int, int], float]) -> list[HeldSequence]:
        """Ends the loads that are complete; returns the requests that need not wait any longer. Called after all of a
        report was told to `answered`."""
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
        by_tier = self._by_tier(job, count, loaded)
        for tier, tokens in enumerate(by_tier):
            self._counts[tier].tokens += tokens
        for request in job.waiters:
            for name, tokens in zip(self._tiers, by_tier, strict=True):
                request.tier_tokens[name] = request.tier_tokens.get(name, 0) + tokens
        return job.waiters

    def _by_tier(self, job: LoadJob, count: int, loaded: int) -> list[int]:
        """`loaded` tokens, of which the first `count` of a job's pages and states have come: those of each tier. What
        is not a whole page goes to the last one's."""
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
        """The worker is lost, and nothing is under way any more."""
        for job in self._jobs:
            self._tree.release(job.node, b"", array("i"))
            self._free(job.slots)
            self._end_state(job, None)
        self._jobs.clear()
        self._under_way.clear()

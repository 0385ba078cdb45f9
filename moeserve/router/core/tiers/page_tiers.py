"""The prefix cache's tiers (RAM, disk) in the router: which pages they hold, and which pages are written and loaded.

The worker copies the bytes (`worker/tiers/page_mover.py`) as ordered in `StepPlan.pages`, and reports in
`StepResult.pages`. A prompt whose continuation is in a tier waits until it is loaded into the prefix tree, while
other prompts are served; it is then bound as with any cached prefix. In a model with recurrent state, prompts
continue only at the end of a page whose state is in a tier, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moeserve.messages.pages import PageOrders, PageReport, Tier, TierCounts, TierNews
from moeserve.messages.router_metrics import LoadReport
from moeserve.router.core.memory.embedding_numbers import EmbeddingNumbers
from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import TOKEN_BYTES, Namespace
from moeserve.router.core.memory.state_memory import StateMemory
from moeserve.router.core.tiers.disk_copies import DiskCopies
from moeserve.router.core.tiers.load_rate import LoadRates
from moeserve.router.core.tiers.page_keys import page_keys, split_keys, state_key
from moeserve.router.core.tiers.page_loader import LoadJob, PageLoader
from moeserve.router.core.tiers.page_writer import PageWriter
from moeserve.router.core.tiers.tier_sizes import TierSizes


@dataclass(slots=True)
class _TierPages:
    """The pages of one tier."""

    counts: TierCounts
    keys: set[bytes] = field(default_factory=set)  # keys of pages and states


class PageTiers:
    """Decides which pages the tiers hold, write and load. The only writer of a request's `tier_tokens`, and
    with RunningBatch of `tiers_were_asked`. It owns the slots of its loads."""

    def __init__(
        self,
        sizes: TierSizes,
        tree: RadixCache,
        states: StateMemory | None,
        take: Callable[[Sequence[int]], array[int]],
        free: Callable[[array[int]], None],
        available: Callable[[], int],
        totals: LoadReport,
        spans: EmbeddingNumbers,
    ) -> None:
        """states: the state slots; None if the model has no recurrent state. take, free, available: functions of the KV
        pool."""
        self._sizes = sizes
        self._page_tokens = sizes.page_tokens
        self._tree = tree
        self._has_states = states is not None
        counts = [totals.ram if tier == "ram" else totals.disk for tier in sizes.tiers]
        self._pages = [_TierPages(one) for one in counts]  # fastest first
        self._rates = LoadRates(sizes.tiers, counts)
        fastest = self._pages[0].keys
        self._spans = spans
        self._writer = PageWriter(sizes, tree, states, fastest, spans, is_ram=sizes.tiers[0] == "ram")
        self._to_disk = DiskCopies(fastest, self._pages[1].keys) if len(sizes.tiers) == 2 else None
        self._loader = PageLoader(
            sizes, tree, states, take, free, available, self._rates, self._tier_of, counts
        )
        # Set by Planner; returns 0 if unknown.
        self.recompute_ms: Callable[[int, int], float] = lambda start, count: 0.0
        self.is_synced = False  # the worker has reported the tiers' contents

    @property
    def has_work(self) -> bool:
        """True if the worker has copies to execute or results to report, even without rows."""
        copies = self._to_disk is not None and self._to_disk.has_work
        return not self.is_synced or self._writer.has_work or self._loader.has_work or copies

    @property
    def is_loading(self) -> bool:
        return self._loader.has_work

    # ---------------------------------------------------------------- requests

    def save(self, namespace: Namespace, tokens: bytes) -> None:
        """Schedules pages of `tokens` for writing, and the states at their ends that the tree has. The tokens must
        be in the tree, and computed or in plans sent."""
        self._writer.save(namespace, tokens)

    def begin_load(self, request: HeldSequence, namespace: Namespace, tokens: bytes, now: float) -> bool:
        """Returns whether a waiting request should wait until more of its prefix is loaded, and starts the load.
        tokens: the tokens that may come from a cache. Called once for each wait. now: monotonic seconds."""
        if request.tiers_were_asked:
            return False
        request.tiers_were_asked = True
        keys = page_keys(namespace, tokens, self._page_tokens, self._spans)
        first = self._tree.num_matched(namespace, tokens) // self._page_tokens
        usable = self._tree.match(namespace, tokens)[0]
        if self._joins(request, keys, first, usable):
            request.tiers_were_asked = False  # its own continuation may also be in a tier
            return True
        found = keys[: self._end(keys, first, self._is_loadable)]
        fast = found[: self._end(found, first, self._pages[0].keys.__contains__)]
        # the whole continuation, or the part that loads fast
        parts = (found, fast) if len(fast) < len(found) else (found,)
        return any(self._begin(request, namespace, tokens, part, first, usable, now) for part in parts)

    @staticmethod
    def _end(keys: list[bytes], first: int, has: Callable[[bytes], bool]) -> int:
        """Returns the end of the run of keys, from `first` on, for which `has` is true."""
        return next((at for at in range(first, len(keys)) if not has(keys[at])), len(keys))

    def _joins(self, request: HeldSequence, keys: list[bytes], first: int, usable: int) -> bool:
        """Makes a request wait for a running load that brings its first missing page, or the state after one of its
        pages. Returns whether it does."""
        if not self._loader.has_work:
            return False
        if first < len(keys) and self._loader.join(request, keys[first]):
            return True
        if not self._has_states:
            return False
        usable_pages = usable // self._page_tokens
        return any(self._loader.join(request, state_key(key)) for key in reversed(keys[usable_pages:]))

    def _is_loadable(self, key: bytes) -> bool:
        return any(key in pages.keys for pages in self._pages) and not self._loader.is_under_way(key)

    def _tier_of(self, key: bytes) -> int:
        """Returns the fastest tier that has the key; the slowest one if none has it any more."""
        last = len(self._pages) - 1
        return next((tier for tier in range(last) if key in self._pages[tier].keys), last)

    def _last_state(self, keys: list[bytes], usable: int) -> int:
        """Returns the largest number of these pages after which the state is in a tier; 0 if none yields more than
        `usable` tokens."""
        ends = range(len(keys), usable // self._page_tokens, -1)
        return next((at for at in ends if self._is_loadable(state_key(keys[at - 1]))), 0)

    def _begin(
        self,
        request: HeldSequence,
        namespace: Namespace,
        tokens: bytes,
        keys: list[bytes],
        first: int,
        usable: int,
        now: float,
    ) -> bool:
        """Starts to load pages from `keys[first]` on, if that is worthwhile. Returns whether it did."""
        step = self._page_tokens
        if self._has_states:
            keys = keys[: self._last_state(keys, usable)]
            first = min(first, len(keys))
        gain = len(keys) * step - usable
        if gain <= 0:
            return False
        wanted = keys[first:]
        if self._has_states:
            wanted.append(state_key(keys[-1]))
        num_bytes = self._loader.bytes_of(wanted, with_state=self._has_states)
        if not self._rates.admits(num_bytes, self.recompute_ms(usable, gain)):
            return False
        border, end = (at * step * TOKEN_BYTES for at in (first, len(keys)))
        job = LoadJob(
            waiters=[request],
            tokens=tokens[border:end],
            keys=wanted,
            start=first * step,
            node=self._tree.acquire_kv(namespace, tokens[:border]),
            usable=usable,
            has_state=self._has_states,
            progress_at=now,
        )
        self._loader.begin(job)
        return True

    def leave(self, request: HeldSequence) -> None:
        """Ends a request's wait for its load."""
        self._loader.leave(request)

    # ---------------------------------------------------------------- steps

    def writes(self, now: float, *, beside_decoding: bool) -> PageOrders:
        """Returns the writes for the plan being started, before slots are granted for it. now: monotonic seconds."""
        return self._writer.orders(now, beside_decoding=beside_decoding)

    def orders(self, writes: PageOrders, now: float) -> PageOrders | None:
        """Returns `writes` and all other copies of the plan being finished; None if there are none. now: monotonic
        seconds."""
        loads = self._loader.orders(self.recompute_ms)
        orders = PageOrders(
            writes=writes.writes,
            loads=loads.loads,
            state_writes=writes.state_writes,
            state_loads=loads.state_loads,
            to_disk=[] if self._to_disk is None else self._to_disk.orders(now),
            used=writes.used,
        )
        return None if orders == PageOrders() else orders

    def report(self, report: PageReport | None, now: float) -> list[HeldSequence]:
        """Takes the worker's report, if any. Returns the requests that need not wait for their loads any longer. now:
        monotonic seconds."""
        if report is not None:
            self._read(report, now)
        return self._loader.finish(now, self.recompute_ms)

    def _read(self, report: PageReport, now: float) -> None:
        self.is_synced = True
        for tier, name in enumerate(self._sizes.tiers):
            self._read_tier(tier, report.ram if name == "ram" else report.disk, now)
        failed = split_keys(report.failed)
        for key in failed:
            self._loader.answered(key, now, None)
        self._pages[-1].counts.failed_pages += len(failed)
        for pages in self._pages:
            pages.keys.difference_update(failed)

    def _read_tier(self, tier: int, news: TierNews, now: float) -> None:
        pages = self._pages[tier]
        for key in split_keys(news.stored):
            pages.keys.add(key)
            num_bytes = self._written(tier, key)
            pages.counts.bytes_written += num_bytes
            if tier == 0 and self._to_disk is not None:
                self._to_disk.add(key, num_bytes or self._sizes.page_bytes)
        refused = split_keys(news.refused)
        for key in (*refused, *split_keys(news.skipped)):
            self._written(tier, key)
        if refused:
            (self._writer if tier == 0 else self._to_disk or self._writer).pause(now)
        num_bytes = 0
        for key in split_keys(news.loaded):
            is_state = self._loader.answered(key, now, tier)
            num_bytes += self._sizes.state_bytes if is_state else self._sizes.page_bytes
        pages.keys.difference_update(split_keys(news.gone))
        self._rates.observe(tier, num_bytes, news.load_ms)
        pages.counts.bytes_read += num_bytes
        pages.counts.load_ms += news.load_ms

    def _written(self, tier: int, key: bytes) -> int:
        """Returns the bytes of an answered write order; 0 for a page that was not ordered."""
        if tier == 0:
            return self._writer.answered(key)
        assert self._to_disk is not None
        return self._to_disk.answered(key)

    def reset(self) -> None:
        """Forgets all orders and contents, because the worker is lost or will not be asked again."""
        self.is_synced = False
        for pages in self._pages:
            pages.keys.clear()
        if self._to_disk is not None:
            self._to_disk.reset()
        self._writer.reset()
        self._loader.reset()
        self._rates.reset()

    # ---------------------------------------------------------------- counts

    def held_tokens(self) -> Iterator[bytes]:
        """Yields the tokens (int32) of running loads."""
        return self._loader.tokens()

    def held_slots(self) -> list[array[int]]:
        """Returns the slots of running loads."""
        return list(self._loader.slots())

    def num_pages(self, name: Tier) -> int:
        """Returns the number of pages and states in a tier; 0 if the tier does not exist."""
        return len(self._pages[self._sizes.tiers.index(name)].keys) if name in self._sizes.tiers else 0

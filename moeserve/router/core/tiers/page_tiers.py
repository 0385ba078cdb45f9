"""The tiers of the prefix cache behind the KV pool, RAM and disk, as the router sees them: which pages there are, and
what is written and loaded when.

The worker moves the bytes (`worker/tiers/page_mover.py`), as `StepPlan.pages` orders, and reports in
`StepResult.pages`. A prompt whose continuation is in a tier waits until it is loaded into the prefix tree, while other
prompts are served, and is then bound as if the tree had had it all the time. Of a model with recurrent state, prompts
continue where a page ends whose state is in a tier, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
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
    keys: set[bytes] = field(default_factory=set)  # of pages and states


class PageTiers:
    """The only writer of a request's `tier_tokens`, and of `tiers_were_asked` with RunningBatch. Its slots are those of
    its loads."""

    def __init__(
        self,
        sizes: TierSizes,
        tree: RadixCache,
        states: StateMemory | None,
        take: Callable[[int], array[int]],
        free: Callable[[array[int]], None],
        available: Callable[[], int],
        totals: LoadReport,
        spans: EmbeddingNumbers,
    ) -> None:
        """`states`: None where the model has none. `take`, `free` and `available`: of the KV pool's slots."""
        self._sizes = sizes
        self._page_tokens = sizes.page_tokens
        self._tree = tree
        self._has_states = states is not None
        counts = [totals.ram if tier == "ram" else totals.disk for tier in sizes.tiers]
        self._pages = [_TierPages(one) for one in counts]  # the fastest first
        self._rates = LoadRates(sizes.tiers, counts)
        fastest = self._pages[0].keys
        self._spans = spans
        self._writer = PageWriter(sizes, tree, states, fastest, spans, is_ram=sizes.tiers[0] == "ram")
        self._to_disk = DiskCopies(fastest, self._pages[1].keys) if len(sizes.tiers) == 2 else None
        self._loader = PageLoader(
            sizes, tree, states, take, free, available, self._rates, self._tier_of, counts
        )
        # Set by Planner; 0: not known.
        self.recompute_ms: Callable[[int, int], float] = lambda start, count: 0.0
        self.is_synced = False  # the worker has told what there is

    @property
    def has_work(self) -> bool:
        """The worker has something to do or to tell, with or without rows."""
        copies = self._to_disk is not None and self._to_disk.has_work
        return not self.is_synced or self._writer.has_work or self._loader.has_work or copies

    @property
    def is_loading(self) -> bool:
        return self._loader.has_work

    # ---------------------------------------------------------------- requests

    def save(self, namespace: Namespace, tokens: bytes) -> None:
        """Has the pages of `tokens` written, which are computed or in plans sent so far, and in the tree, and the
        states that the tree has at their ends."""
        self._writer.save(namespace, tokens)

    def begin_load(self, request: HeldSequence, namespace: Namespace, tokens: bytes, now: float) -> bool:
        """Whether a waiting request, of which `tokens` may come from a cache, does better to wait until more of them
        are loaded. Asked once each time that it waits."""
        if request.tiers_were_asked:
            return False
        request.tiers_were_asked = True
        keys = page_keys(namespace, tokens, self._page_tokens, self._spans)
        first = self._tree.num_matched(namespace, tokens) // self._page_tokens
        usable = self._tree.match(namespace, tokens)[0]
        if self._joins(request, keys, first, usable):
            request.tiers_were_asked = False  # its own continuation may be in a tier, too
            return True
        found = keys[: self._end(keys, first, self._is_loadable)]
        fast = found[: self._end(found, first, self._pages[0].keys.__contains__)]
        parts = (found, fast) if len(fast) < len(found) else (found,)  # all of it, or what is quick to load
        return any(self._begin(request, namespace, tokens, part, first, usable, now) for part in parts)

    @staticmethod
    def _end(keys: list[bytes], first: int, has: Callable[[bytes], bool]) -> int:
        """How far the keys from `first` on have no gap."""
        return next((at for at in range(first, len(keys)) if not has(keys[at])), len(keys))

    def _joins(self, request: HeldSequence, keys: list[bytes], first: int, usable: int) -> bool:
        """Has a request wait for a load that brings its first page that is missing, or the state after any of its
        pages."""
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
        """The fastest tier that has it; the slowest, where none has it any more."""
        last = len(self._pages) - 1
        return next((tier for tier in range(last) if key in self._pages[tier].keys), last)

    def _last_state(self, keys: list[bytes], usable: int) -> int:
        """The most of these pages after which the state is in a tier; 0: none that gives more than `usable` tokens."""
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
        """Begins the load of pages from the `first` of `keys` on, if there is anything to gain from it."""
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
        """A request no longer waits for its load."""
        self._loader.leave(request)

    # ---------------------------------------------------------------- steps

    def writes(self, now: float, *, beside_decoding: bool) -> PageOrders:
        """What to write with the plan that is being begun, before any slot is taken for it."""
        return self._writer.orders(now, beside_decoding=beside_decoding)

    def orders(self, writes: PageOrders, now: float) -> PageOrders | None:
        """`writes`, and what else the plan that is being ended moves; None: nothing."""
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
        """Takes what the worker tells with a step's result, if anything; returns the requests that need not wait for
        their loads any longer."""
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
        """The bytes of an order to write that has been answered; 0 for an order that was not made."""
        if tier == 0:
            return self._writer.answered(key)
        assert self._to_disk is not None
        return self._to_disk.answered(key)

    def reset(self) -> None:
        """The worker is lost, or never asked again: nothing is under way, and what there is must be told anew."""
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
        """Those of loads under way, int32."""
        return self._loader.tokens()

    def held_slots(self) -> list[array[int]]:
        """Those of loads under way."""
        return list(self._loader.slots())

    def num_pages(self, name: Tier) -> int:
        """Pages and states in a tier; 0 where there is no such tier."""
        return len(self._pages[self._sizes.tiers.index(name)].keys) if name in self._sizes.tiers else 0

"""The prefix cache's tier on disk, as the router sees it: which pages there are, and what is written and loaded when.

The worker moves the bytes (`worker/page_mover.py`), as `StepPlan.pages` orders, and tells in `StepResult.pages` what
became of it. A prompt whose continuation is on disk waits until it is loaded into the prefix tree, while other prompts
are served, and is then bound as if the tree had had it all the time. Of a model with recurrent state, prompts continue
where a page ends whose state is on disk, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from moeserve.messages.pages import DiskCounts, PageOrders, PageReport
from moeserve.router.core.load_rate import LoadRate
from moeserve.router.core.page_keys import page_keys, split_keys, state_key
from moeserve.router.core.page_loader import LoadJob, PageLoader, TierSizes
from moeserve.router.core.page_writer import PageWriter
from moeserve.router.core.radix_cache import RadixCache
from moeserve.router.core.radix_node import TOKEN_BYTES, Namespace
from moeserve.router.core.request import Request
from moeserve.router.core.state_memory import StateMemory


class DiskTier:
    """The only writer of a request's `disk_tokens` and `disk_was_asked`. Its slots are those of its loads."""

    def __init__(
        self,
        sizes: TierSizes,
        tree: RadixCache,
        states: StateMemory | None,
        take: Callable[[int], array[int]],
        free: Callable[[array[int]], None],
        available: Callable[[], int],
    ) -> None:
        """`states`: None where the model has none. `take`, `free` and `available`: of the KV pool's slots."""
        self._sizes = sizes
        self._page_tokens = sizes.page_tokens
        self._tree = tree
        self._has_states = states is not None
        self._on_disk: set[bytes] = set()  # keys of pages and states
        self._rate = LoadRate()
        self._writer = PageWriter(sizes.page_tokens, sizes.page_bytes, tree, states, self._on_disk)
        self._loader = PageLoader(sizes, tree, states, take, free, available, self._rate)
        self.recompute_ms: Callable[[int, int], float] = lambda start, count: (
            0.0
        )  # set by Planner; 0: not known
        self.is_synced = False  # the worker has told what is on disk
        self._bytes_read = self._num_failed = 0  # failed: pages and states
        self._load_ms = 0.0

    @property
    def has_work(self) -> bool:
        """The worker has something to do or to tell, with or without rows."""
        return not self.is_synced or self._writer.has_work or self._loader.has_work

    @property
    def is_loading(self) -> bool:
        return self._loader.has_work

    # ---------------------------------------------------------------- requests

    def save(self, namespace: Namespace, tokens: bytes) -> None:
        """Has the pages of `tokens` written, which are computed or in plans sent so far, and in the tree, and the
        states that the tree has at their ends."""
        self._writer.save(namespace, tokens)

    def begin_load(self, request: Request, namespace: Namespace, tokens: bytes, now: float) -> bool:
        """Whether a waiting request, of which `tokens` may come from a cache, does better to wait until more of them
        are loaded. Asked once each time that it waits."""
        if request.disk_was_asked:
            return False
        request.disk_was_asked = True
        keys = page_keys(namespace, tokens, self._page_tokens)
        first = self._tree.num_matched(namespace, tokens) // self._page_tokens
        usable = self._tree.match(namespace, tokens)[0]
        if self._joins(request, keys, first, usable):
            request.disk_was_asked = False  # its own continuation may be on disk, too
            return True
        end = first
        while end < len(keys) and self._is_loadable(keys[end]):
            end += 1
        if self._has_states:
            end = self._last_state(keys, end, usable)
            first = min(first, end)
        return self._begin(request, namespace, tokens, keys[:end], first, usable, now)

    def _joins(self, request: Request, keys: list[bytes], first: int, usable: int) -> bool:
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
        return key in self._on_disk and not self._loader.is_under_way(key)

    def _last_state(self, keys: list[bytes], end: int, usable: int) -> int:
        """The most of the first `end` pages after which the state is on disk; 0: none that gives more than `usable`
        tokens."""
        ends = range(end, usable // self._page_tokens, -1)
        return next((at for at in ends if self._is_loadable(state_key(keys[at - 1]))), 0)

    def _begin(
        self,
        request: Request,
        namespace: Namespace,
        tokens: bytes,
        keys: list[bytes],
        first: int,
        usable: int,
        now: float,
    ) -> bool:
        """Begins the load of pages from the `first` of `keys` on, if there is anything to gain from it."""
        step = self._page_tokens
        gain = len(keys) * step - usable
        if gain <= 0:
            return False
        wanted = keys[first:]
        num_bytes = len(wanted) * self._sizes.page_bytes
        if self._has_states:
            wanted.append(state_key(keys[-1]))
            num_bytes += self._sizes.state_bytes
        if not self._rate.admits(num_bytes, self.recompute_ms(usable, gain)):
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

    def leave(self, request: Request) -> None:
        """A request no longer waits for its load."""
        self._loader.leave(request)

    # ---------------------------------------------------------------- steps

    def writes(self, now: float, *, beside_decoding: bool) -> PageOrders:
        """What to write with the plan that is being begun, before any slot is taken for it."""
        return self._writer.orders(now, beside_decoding=beside_decoding)

    def orders(self, writes: PageOrders) -> PageOrders | None:
        """`writes`, and what the plan that is being ended loads; None: nothing."""
        loads = self._loader.orders(self.recompute_ms)
        both = PageOrders(writes.writes, loads.loads, writes.state_writes, loads.state_loads)
        return None if both == PageOrders() else both

    def report(self, report: PageReport | None, now: float) -> list[Request]:
        """Takes what the worker tells with a step's result, if anything; returns the requests that need not wait for
        their loads any longer."""
        if report is not None:
            self._read(report, now)
        return self._loader.finish(now, self.recompute_ms)

    def _read(self, report: PageReport, now: float) -> None:
        self.is_synced = True
        for key in split_keys(report.stored):
            self._on_disk.add(key)
            self._writer.answered(key, is_written=True)
        refused = split_keys(report.refused)
        for key in refused:
            self._writer.answered(key, is_written=False)
        if refused:
            self._writer.pause(now)
        loaded, failed = split_keys(report.loaded), split_keys(report.failed)
        num_bytes = 0
        for key in loaded:
            is_state = self._loader.answered(key, now, is_there=True)
            num_bytes += self._sizes.state_bytes if is_state else self._sizes.page_bytes
        for key in failed:
            self._loader.answered(key, now, is_there=False)
        self._on_disk.difference_update(failed)
        self._on_disk.difference_update(split_keys(report.gone))
        self._rate.observe(num_bytes, report.load_ms)
        self._bytes_read += num_bytes
        self._num_failed += len(failed)
        self._load_ms += report.load_ms

    def reset(self) -> None:
        """The worker is lost, or never asked again: nothing is under way, and what is on disk must be told anew."""
        self.is_synced = False
        self._on_disk.clear()
        self._writer.reset()
        self._loader.reset()

    # ---------------------------------------------------------------- counts

    def held_slots(self) -> list[array[int]]:
        """Those of loads under way."""
        return list(self._loader.slots())

    def counts(self) -> DiskCounts:
        return DiskCounts(
            pages=len(self._on_disk),
            bytes_written=self._writer.num_written * self._sizes.page_bytes
            + self._writer.num_states_written * self._sizes.state_bytes,
            bytes_read=self._bytes_read,
            tokens=self._loader.num_tokens,
            load_ms=self._load_ms,
            declined=self._rate.num_declined,
            failed_pages=self._num_failed,
        )

"""Owns every KV slot. After every call, each slot is free, private to one request or to a load from a tier, or in
the prefix tree.

The slots of a request, by position:

    position   0 ................. num_shared ................. len(slots)
               | owned by the tree,     | private to the request; |  not planned yet
               | referenced by `node`   | moved into the tree     |
               |                        | when it leaves          |

Slots in the tree may be shared even before their KV is computed: the worker executes plans in order and, in each
layer, writes the KV of all rows of a step before any row attends.

In a model with recurrent state, a request continues from a snapshot (`state_memory.py`) and recomputes the tokens
after it that the tree has KV for. It computes them into private slots, because a slot has one writer. `publish` then
replaces the tree's slots for these tokens by the private ones, unless another running request references the tree's.

If windowed layers have their own KV pool, this module manages the full layers' slots, and `window_memory.py` the
others. A request then continues from a segment in the same way as from a snapshot.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from struct import Struct, iter_unpack

from moeserve.messages.kv_events import KvEvent
from moeserve.messages.pages import PageOrders, PageReport
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import Fork
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.block_log import BlockLog
from moeserve.router.core.memory.embedding_numbers import EmbeddingNumbers
from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.publisher import Publisher
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Node, SnapshotKind
from moeserve.router.core.memory.sequence_memory import RowSlots, SequenceMemory
from moeserve.router.core.memory.snapshot_taker import SnapshotTaker
from moeserve.router.core.memory.state_memory import StateMemory
from moeserve.router.core.memory.token_pool import TokenPool
from moeserve.router.core.memory.window_memory import WindowMemory
from moeserve.router.core.tiers.page_tiers import PageTiers
from moeserve.router.core.tiers.tier_sizes import TierSizes

_pack_slot = Struct("<i").pack


class KvMemory(SequenceMemory):
    """Owns the KV slots, and with them windows, states and tiers: the implementation of `SequenceMemory`. The
    only writer of a request's `slots`, `node`, `num_shared` and `borrowed`, and of its beams' slots;
    `Publisher` writes them on its behalf."""

    def __init__(self, limits: Limits, totals: LoadReport) -> None:
        tiers = _tier_sizes(limits)
        self._is_recurrent = limits.num_state_slots > 0
        has_windows = limits.num_window_slots > 0
        self._pool = TokenPool(limits.num_kv_slots, limits.slot_kinds)
        self._spans = EmbeddingNumbers(self._cached_tokens)
        self._log = None
        if limits.event_block_size is not None:
            self._log = BlockLog(limits.event_block_size, self._spans)
        self._tree = RadixCache(recurrent=self._is_recurrent or has_windows, log=self._log)
        self._states = StateMemory(limits.num_state_slots, self._tree, totals)
        spacing = limits.snapshot_spacing
        aligned = replace(spacing, align=1 if tiers is None else tiers.page_tokens)
        self._taker = SnapshotTaker(self._tree, self._states, aligned)
        self._windows: WindowMemory | None = None
        if has_windows:
            assert not self._is_recurrent
            assert tiers is None
            sizes = limits.num_window_slots, limits.window
            self._windows = WindowMemory(*sizes, self._tree, spacing, totals)
        self._reuse = limits.reuse_prefixes
        self._isolate = limits.isolate_tenants
        self._tiers: PageTiers | None = None
        if tiers is not None and self._reuse:
            states = self._states if self._is_recurrent else None
            self._tiers = PageTiers(
                tiers,
                self._tree,
                states,
                self._take,
                self._pool.free,
                lambda: self.available,
                totals,
                self._spans,
            )
        self._writes = PageOrders()  # page writes for the step being planned
        self._publisher = Publisher(
            self._tree, self._pool, self._windows, exchanges=self._is_recurrent or has_windows
        )

    @property
    def num_slots(self) -> int:
        return self._pool.num_slots

    @property
    def available(self) -> int:
        return self._pool.num_free + self._tree.num_idle

    @property
    def num_held(self) -> int:
        return self._pool.num_slots - self.available

    def opened(self, request: HeldSequence) -> None:
        self._spans.name(request.tokens, request.spans)

    def closed(self, request: HeldSequence) -> None:
        self._spans.leave(request.tokens, request.spans)

    def _cached_tokens(self) -> Iterator[bytes | bytearray]:
        yield from (node.tokens for node in self._tree.nodes())
        if self._tiers is not None:
            yield from self._tiers.held_tokens()

    def lookup(self, request: HeldSequence) -> tuple[int, int]:
        if not self._reuse:
            return 0, 0
        return self._tree.match(request.namespace(isolate_tenants=self._isolate), request.reusable)

    def attach(self, request: HeldSequence) -> None:
        if self._is_recurrent and request.beams is not None:
            request.beams.more_state_slots = self._states.take_more(request.width - 1)
        if not self._reuse:
            if self._is_recurrent:
                self._states.bind(request, None)
            if self._windows is not None:
                self._windows.attach(request, 0)
            return
        namespace, tokens = request.namespace(isolate_tenants=self._isolate), request.reusable
        idle_before = self._tree.num_idle
        request.node, request.slots = self._tree.acquire(namespace, tokens)
        request.num_shared = len(request.slots)
        request.borrowed = request.num_shared - (idle_before - self._tree.num_idle)
        if self._is_recurrent:
            self._states.bind(request, request.node.snapshot)
            self._taker.bound(request, self._tree.num_matched(namespace, tokens))
        if self._windows is not None:
            self._windows.attach(request, self._tree.num_matched(namespace, tokens))

    def _take(self, positions: Sequence[int]) -> array[int]:
        """Allocates a slot for each position, evicting cached prefixes if needed. Raises PoolExhausted for more than
        `available`."""
        while (lacking := self._pool.lacking(positions)) and self._tree.num_idle:
            self._pool.free(self._tree.evict(lacking))
            self._reclaim()
        return self._pool.alloc(positions)

    def grant(self, request: HeldSequence, count: int) -> RowSlots:
        start = len(request.slots)
        taken = self._take(range(start, start + count))
        request.slots.extend(taken)
        in_window = b""
        if self._windows is not None:
            windows = self._windows.take(count)
            request.window_slots.extend(windows)
            in_window = windows.tobytes()
        return RowSlots(taken.tobytes(), in_window)

    def grant_each(self, requests: Sequence[HeldSequence]) -> Iterable[tuple[bytes, bytes]]:
        taken = self._take([len(request.slots) for request in requests])
        for request, slot in zip(requests, taken, strict=True):
            request.slots.append(slot)
        windows = None
        if self._windows is not None:
            windows = self._windows.take(len(requests))
            for request, slot in zip(requests, windows, strict=True):
                request.window_slots.append(slot)
        return _packed(taken, windows)

    def grant_beams(self, request: HeldSequence) -> tuple[list[Fork], Iterable[tuple[bytes, bytes]]]:
        assert request.beams is not None
        count = len(request.beams.rows)
        taken = self._take([request.beams.position] * count)
        windows = None if self._windows is None else self._windows.take(count)
        return request.beams.plan(taken, windows), _packed(taken, windows)

    def publish(self, request: HeldSequence) -> None:
        end = min(request.num_planned, len(request.tokens))
        if request.node is None or request.num_shared == end:
            return
        self._publisher.publish(request, end)
        if self._is_recurrent:
            self._taker.planned(request)

    def detach(self, request: HeldSequence, *, forget: bool = False, preempted: bool = False) -> None:
        kind = SnapshotKind.PREEMPTED if preempted else SnapshotKind.ANSWER
        if not forget:
            self.save(request)
        has_moved = request.beams is not None and request.beams.search.length > 0
        self._stop_beams(request)
        num_planned = request.num_planned
        begin, end = request.num_shared, min(num_planned, len(request.tokens))
        # The state becomes no snapshot if the last row may have consumed a token that was never read, or if a row in
        # flight may advance it by drafts. (After a stop token there are no drafts.)
        is_still = request.pending_drafts == 0 or request.has_stopped
        last: Node | None = None
        if request.node is None:
            begin = end = 0
        elif forget:
            end = begin
            self._pool.free(self._tree.discard(request.node))
        else:
            tokens, slots = request.tokens[begin:end].tobytes(), request.slots[begin:end]
            surplus, last = self._tree.release(request.node, tokens, slots)
            self._pool.free(surplus)
        if self._is_recurrent:
            is_known = 0 < num_planned == end and not has_moved and is_still
            self._leave_state(request, last if is_known else None, kind)
        if self._windows is not None:
            self._windows.leave(request, last, end, kind)
        self._pool.free(request.slots[end:])
        request.slots, request.node = array("i"), None
        request.num_shared = request.borrowed = request.spare = request.pending_drafts = 0

    def _stop_beams(self, request: HeldSequence) -> None:
        if request.beams is None:
            return
        self._pool.free(request.beams.stop())
        if self._windows is not None:
            self._windows.free_beams(request)
        if self._is_recurrent:
            self._states.free_more(request.beams.more_state_slots)
            request.beams.more_state_slots = [-1] * (request.width - 1)

    def advance_beams(self, request: HeldSequence, tops: Sequence[TokenLogprob]) -> int:
        assert request.beams is not None
        freed, forks = request.beams.advance(tops)
        self._pool.free(freed)
        if self._windows is not None:
            self._windows.free_beams(request)
        if self._is_recurrent:
            state_slots = dict(zip(request.beams.req_slots, request.state_slots, strict=True))
            for source, target in forks:
                self._states.copy(state_slots[source], state_slots[target])
        return len(forks)

    def _leave_state(self, request: HeldSequence, node: Node | None, kind: SnapshotKind) -> None:
        """Turns the state of a request that leaves into the snapshot at `node`; frees it if `node` is None."""
        self._taker.left(request)
        if node is None:
            self._states.free(request)
        else:
            self._states.keep(request, node, kind)
        self._states.reclaim()

    # ---------------------------------------------------------------- snapshots

    def begin_rows(self) -> None:
        self._taker.take()
        if self._windows is not None:
            self._windows.begin_rows()

    def take_copies(self) -> bytes:
        return self._states.take_copies()

    def _reclaim(self) -> None:
        """Frees the resources of snapshots whose KV the tree has evicted."""
        if self._windows is None:
            self._states.reclaim()
        else:
            self._windows.reclaim()

    def awaits_snapshot(self, request: HeldSequence, prompts: Iterable[HeldSequence]) -> bool:
        if not self._is_recurrent or not self._reuse:
            return False
        found, _ = self.lookup(request)
        namespace = request.namespace(isolate_tenants=self._isolate)
        same = (prompt for prompt in prompts if prompt.namespace(isolate_tenants=self._isolate) == namespace)
        return self._taker.ask(request.reusable, found, same)

    # ---------------------------------------------------------------- tiers

    def save(self, request: HeldSequence) -> None:
        if self._tiers is not None:
            end = min(request.num_planned, len(request.tokens))
            self._tiers.save(request.namespace(isolate_tenants=self._isolate), request.tokens[:end].tobytes())

    def begin_load(self, request: HeldSequence, now: float) -> bool:
        if self._tiers is None or request.tiers_were_asked:
            return False
        return self._tiers.begin_load(
            request, request.namespace(isolate_tenants=self._isolate), request.reusable, now
        )

    def leave_load(self, request: HeldSequence) -> None:
        assert self._tiers is not None
        self._tiers.leave(request)

    def price_with(self, recompute_ms: Callable[[int, int], float]) -> None:
        if self._tiers is not None:
            self._tiers.recompute_ms = recompute_ms

    @property
    def is_synced(self) -> bool:
        return self._tiers is None or self._tiers.is_synced

    @property
    def is_loading(self) -> bool:
        return self._tiers is not None and self._tiers.is_loading

    @property
    def has_work(self) -> bool:
        return self._tiers is not None and self._tiers.has_work

    def begin_step(self, now: float, *, beside_decoding: bool) -> None:
        if self._tiers is not None:
            self._writes = self._tiers.writes(now, beside_decoding=beside_decoding)

    def end_step(self, now: float) -> PageOrders | None:
        return None if self._tiers is None else self._tiers.orders(self._writes, now)

    def take_report(self, report: PageReport | None, now: float) -> list[HeldSequence]:
        return [] if self._tiers is None else self._tiers.report(report, now)

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.reset()

    def clear(self) -> None:
        self.close()
        self._pool.free(self._tree.evict(self._tree.num_tokens))
        self._reclaim()
        self._states.clear()
        if self._log is not None:
            self._log.cleared()

    def take_events(self) -> list[KvEvent]:
        return [] if self._log is None else self._log.take()

    def set_gauges(self, report: LoadReport) -> None:
        report.kv_slots_used = self.num_held
        report.kv_slots_total = self.num_slots
        report.kv_slots_cached = self._tree.num_idle
        report.state_slots_total = self._states.num_slots
        report.state_slots_running = self._states.num_running
        report.state_slots_snapshots = self._states.num_snapshots
        if self._windows is not None:
            report.window_slots_total = self._windows.num_slots
            report.window_slots_used = self._windows.num_held
            report.window_slots_cached = self._windows.num_cached
        if self._tiers is not None:
            report.ram.pages, report.disk.pages = self._tiers.num_pages("ram"), self._tiers.num_pages("disk")

    # ---------------------------------------------------------------- invariants

    def check_counts(self, running: Collection[HeldSequence]) -> None:
        private = sum(request.num_slots - request.num_shared for request in running)
        loading = [] if self._tiers is None else self._tiers.held_slots()
        private += sum(len(slots) for slots in loading)
        if self._pool.num_free + private + self._tree.num_tokens != self._pool.num_slots:
            raise AssertionError(
                f"{self._pool.num_free} free + {private} private + {self._tree.num_tokens} cached KV slots "
                f"are not {self._pool.num_slots}"
            )
        rows = sum(request.width for request in running)
        if self._is_recurrent and self._states.num_running != rows:
            raise AssertionError(f"{self._states.num_running} state slots for {rows} sequences that run")
        if self._tree.num_idle > self._tree.num_tokens or (not running and not loading and self.num_held):
            idle, cached = self._tree.num_idle, self._tree.num_tokens
            raise AssertionError(
                f"{idle} of {cached} cached KV slots count as idle; {self.num_held} are held"
            )

    def check_slots(self, running: Collection[HeldSequence]) -> None:
        self._tree.check()
        private = [request.slots[request.num_shared :] for request in running]
        private += [array("i", r.beams.held_slots()) for r in running if r.beams is not None]
        loading = [] if self._tiers is None else self._tiers.held_slots()
        self._pool.check([*private, *loading, *(node.slots for node in self._tree.nodes())])
        if self._is_recurrent:
            self._states.check(running)
        if self._windows is not None:
            self._windows.check(running)


def _packed(slots: array[int], windows: array[int] | None) -> Iterable[tuple[bytes, bytes]]:
    """Yields each row's slot and window slot (empty without such a pool), as bytes."""
    in_window: Iterable[bytes] = repeat(b"") if windows is None else map(_pack_slot, windows)
    return zip((packed for (packed,) in iter_unpack("4s", slots.tobytes())), in_window, strict=False)


def _tier_sizes(limits: Limits) -> TierSizes | None:
    if not limits.page_tokens:
        return None
    return TierSizes(
        limits.page_tokens,
        limits.page_bytes,
        limits.state_bytes,
        limits.max_running,
        limits.page_write_bytes,
        limits.tiers,
    )

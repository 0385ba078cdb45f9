"""Chooses the pages to write to the fastest tier: pages of prompts whose answer has its first token, and pages of
requests that end. They are written in order, a few at a time, while the prefix tree still has them. Snapshots of
recurrent state at the ends of pages follow, one at a time.

Pages are copied out of their slots before any other work of the plan that orders them, so nothing needs to hold the
slots until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from moeserve.messages.pages import WRITES_UNDER_WAY, PageCopy, PageOrders, StateCopy
from moeserve.router.core.memory.embedding_numbers import EmbeddingNumbers
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Namespace, Snapshot, SnapshotKind
from moeserve.router.core.memory.state_memory import StateMemory
from moeserve.router.core.tiers.page_keys import page_keys, state_key
from moeserve.router.core.tiers.tier_sizes import TierSizes

MOST_JOBS = 256  # jobs waiting; beyond that the oldest is dropped
PAUSE_S = 60.0  # after a failed write


@dataclass(slots=True)
class _SaveJob:
    namespace: Namespace
    tokens: bytes
    keys: list[bytes]
    next: int = 0  # index of the first page that is neither written nor ordered, as far as known


class PageWriter:
    def __init__(
        self,
        sizes: TierSizes,
        tree: RadixCache,
        states: StateMemory | None,
        in_tier: Container[bytes],
        spans: EmbeddingNumbers,
        *,
        is_ram: bool,
    ) -> None:
        """in_tier: keys in the fastest tier. is_ram: whether that tier is RAM, which evicts its least recently used
        pages."""
        self._page_tokens = sizes.page_tokens
        self._page_bytes, self._state_bytes = sizes.page_bytes, sizes.state_bytes
        self._tree = tree
        self._states = states  # None if the model has no recurrent state
        self._in_tier = in_tier
        self._spans = spans
        self._is_ram = is_ram
        self._jobs: deque[_SaveJob] = deque(maxlen=MOST_JOBS)
        self._ordered: set[bytes] = set()
        self._ordered_state: bytes | None = None
        self._most = max(1, WRITES_UNDER_WAY * sizes.write_bytes // sizes.page_bytes)
        self._most_beside_decoding = max(1, sizes.write_bytes // sizes.page_bytes)
        self._paused_until = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._ordered) or self._ordered_state is not None

    def save(self, namespace: Namespace, tokens: bytes) -> None:
        """Schedules the complete pages of `tokens` that are not in the tier, and the snapshots at their ends."""
        keys = page_keys(namespace, tokens, self._page_tokens, self._spans)
        is_of_use = self._is_ram or self._states is not None
        if keys and (is_of_use or any(key not in self._in_tier for key in keys)):
            self._jobs.append(_SaveJob(namespace, tokens, keys))

    def orders(self, now: float, *, beside_decoding: bool) -> PageOrders:
        """Returns the writes for the plan being started, whose own tokens are not in the tree yet. now: monotonic
        seconds."""
        if now < self._paused_until:
            self._jobs.clear()
        room = self._most - len(self._ordered)
        if beside_decoding:
            room = min(room, self._most_beside_decoding)
        pages: list[PageCopy] = []
        states: list[StateCopy] = []
        used: list[bytes] = []
        while self._jobs and len(pages) < room:
            job = self._jobs[0]
            if not self._order_pages(job, pages, room) or not self._order_state(job, states):
                break
            used += self._used(job)
            self._jobs.popleft()
        return PageOrders(pages, state_writes=states, used=b"".join(used))

    def _used(self, job: _SaveJob) -> list[bytes]:
        """Returns the job's keys from last to first: the first page is marked as most recently used, because later
        pages are useless without it."""
        if not self._is_ram:
            return []
        keys = reversed(job.keys)
        return [each for key in keys for each in ((key,) if self._states is None else (state_key(key), key))]

    def _order_pages(self, job: _SaveJob, orders: list[PageCopy], room: int) -> bool:
        """Orders a job's next pages. Returns whether none is left."""
        step = self._page_tokens
        cached = None
        while job.next < len(job.keys):
            key = job.keys[job.next]
            if key not in self._in_tier and key not in self._ordered:
                if len(orders) == room:
                    return False
                if cached is None:
                    cached = self._tree.cached_slots(job.namespace, job.tokens)
                slots = cached[job.next * step : (job.next + 1) * step]
                if len(slots) < step:
                    job.next = len(job.keys)  # evicted
                    return True
                orders.append(PageCopy(key, slots.tobytes()))
                self._ordered.add(key)
            job.next += 1
        return True

    def _order_state(self, job: _SaveJob, orders: list[StateCopy]) -> bool:
        """Orders the state of a job's next snapshot. Returns whether none is left."""
        if self._states is None:
            return True
        for snapshot in self._tree.snapshots_of(job.namespace, job.tokens):
            key = self._state_key(job, snapshot)
            if key is None or key in self._in_tier or key == self._ordered_state:
                continue
            if self._ordered_state is not None or not self._states.is_copied(snapshot):
                return False
            orders.append(StateCopy(key, snapshot.slot))
            self._ordered_state = key
        return True

    def _state_key(self, job: _SaveJob, snapshot: Snapshot) -> bytes | None:
        """Returns the key under which a snapshot is written; None if it is not: no page ends at its position, or it
        is one of the spaced snapshots of a long prompt, which only serve edits."""
        index, rest = divmod(snapshot.position, self._page_tokens)
        if rest or snapshot.kind is SnapshotKind.SPACED:
            return None
        return state_key(job.keys[index - 1])

    def answered(self, key: bytes) -> int:
        """Notes that the worker answered a write order. Returns its bytes; 0 for a page that was there at the
        worker's start."""
        if key in self._ordered:
            self._ordered.remove(key)
            return self._page_bytes
        if key == self._ordered_state:
            self._ordered_state = None
            return self._state_bytes
        return 0

    def pause(self, now: float) -> None:
        """Pauses writing for a while, after a failed write. now: monotonic seconds."""
        self._paused_until = now + PAUSE_S
        self._jobs.clear()

    def reset(self) -> None:
        """Forgets all orders, after the worker was lost with its copies."""
        self._jobs.clear()
        self._ordered.clear()
        self._ordered_state = None

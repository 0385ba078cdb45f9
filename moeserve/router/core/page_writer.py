"""Which pages are written to disk, and when: those of prompts once their first token is there, and those of whoever
leaves, in order, a few at a time, as long as the prefix tree still has them. Behind them go snapshots of recurrent
state at the ends of pages, one at a time.

What is written is copied out of its slots before anything else of the plan that orders it, so nothing holds its slots
until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from moeserve.messages.pages import PageCopy, PageOrders, StateCopy
from moeserve.router.core.page_keys import page_keys, state_key
from moeserve.router.core.radix_cache import RadixCache
from moeserve.router.core.radix_node import Namespace, Snapshot, SnapshotKind
from moeserve.router.core.state_memory import StateMemory

MOST_JOBS = 256  # beyond it the oldest is dropped
BYTES_UNDER_WAY = 64 << 20  # copies that the worker holds until they are on disk
BYTES_BESIDE_DECODING = 8 << 20  # copied before a step whose decode rows would wait for more
PAUSE_S = 60.0  # after a write that failed


@dataclass(slots=True)
class _SaveJob:
    namespace: Namespace
    tokens: bytes
    keys: list[bytes]
    next: int = 0  # index of the first page that is not known to be written or ordered


class PageWriter:
    def __init__(
        self,
        page_tokens: int,
        page_bytes: int,
        tree: RadixCache,
        states: StateMemory | None,
        on_disk: Container[bytes],
    ) -> None:
        self._page_tokens = page_tokens
        self._tree = tree
        self._states = states  # None: the model has none
        self._on_disk = on_disk
        self._jobs: deque[_SaveJob] = deque(maxlen=MOST_JOBS)
        self._ordered: set[bytes] = set()
        self._ordered_state: bytes | None = None
        self._most = max(1, BYTES_UNDER_WAY // page_bytes)
        self._most_beside_decoding = max(1, BYTES_BESIDE_DECODING // page_bytes)
        self._paused_until = 0.0
        self.num_written = self.num_states_written = 0

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._ordered) or self._ordered_state is not None

    def save(self, namespace: Namespace, tokens: bytes) -> None:
        """Has the whole pages of `tokens` written that are not on disk, and snapshots of state at their ends."""
        keys = page_keys(namespace, tokens, self._page_tokens)
        if any(key not in self._on_disk for key in keys) or (keys and self._states is not None):
            self._jobs.append(_SaveJob(namespace, tokens, keys))

    def orders(self, now: float, *, beside_decoding: bool) -> PageOrders:
        """What to write with the plan that is being begun; the tree has nothing yet that this plan computes."""
        if now < self._paused_until:
            self._jobs.clear()
        room = self._most - len(self._ordered)
        if beside_decoding:
            room = min(room, self._most_beside_decoding)
        pages: list[PageCopy] = []
        states: list[StateCopy] = []
        while self._jobs and len(pages) < room:
            job = self._jobs[0]
            if not self._order_pages(job, pages, room) or not self._order_state(job, states):
                break
            self._jobs.popleft()
        return PageOrders(pages, state_writes=states)

    def _order_pages(self, job: _SaveJob, orders: list[PageCopy], room: int) -> bool:
        """Adds a job's next pages; whether none is left."""
        step = self._page_tokens
        cached = None
        while job.next < len(job.keys):
            key = job.keys[job.next]
            if key not in self._on_disk and key not in self._ordered:
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
        """Adds the state of a job's next snapshot; whether none is left."""
        if self._states is None:
            return True
        for snapshot in self._tree.snapshots_of(job.namespace, job.tokens):
            key = self._state_key(job, snapshot)
            if key is None or key in self._on_disk or key == self._ordered_state:
                continue
            if self._ordered_state is not None or not self._states.is_copied(snapshot):
                return False
            orders.append(StateCopy(key, snapshot.slot))
            self._ordered_state = key
        return True

    def _state_key(self, job: _SaveJob, snapshot: Snapshot) -> bytes | None:
        """None for a snapshot that is not written: a page does not end there, or it is one of many in a long prompt,
        for an edit that may come."""
        index, rest = divmod(snapshot.position, self._page_tokens)
        if rest or snapshot.kind is SnapshotKind.SPACED:
            return None
        return state_key(job.keys[index - 1])

    def answered(self, key: bytes, *, is_written: bool) -> None:
        """The worker has written a page or a state, or failed to; or it tells of one that was there at its start."""
        if key in self._ordered:
            self._ordered.remove(key)
            self.num_written += is_written
        elif key == self._ordered_state:
            self._ordered_state = None
            self.num_states_written += is_written

    def pause(self, now: float) -> None:
        """A write has failed: there are none for a while."""
        self._paused_until = now + PAUSE_S
        self._jobs.clear()

    def reset(self) -> None:
        """The worker is lost, with all copies."""
        self._jobs.clear()
        self._ordered.clear()
        self._ordered_state = None

"""Moves pages of KV, and recurrent states, between their slots and the disk, by threads: no step ever waits for the
disk.

A write is copied out of its slots at once, because the rows of the same plan may overwrite them; a thread writes the
copy to disk. A load is read and put into its slots by other threads, while steps run that use other slots. The router
bounds how many of either are under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from moeserve.kv.cache_pages import CachePages
from moeserve.kv.disk.store import PageStore
from moeserve.messages.pages import PageCopy, PageOrders, PageReport, StateCopy

READERS = 2  # checksums take as long as reading does from a fast disk
LOST_ROUTER_WAIT_S = 10.0  # for the orders of a router that is lost
IDLE_WAIT_S = 0.01  # that a plan without rows waits for something to report

Slots = npt.NDArray[np.int32]

log = logging.getLogger(__name__)


class PageMover:
    """`order` and `report` are for the thread that executes plans. The threads are daemons: a disk that hangs does not
    keep the process from ending."""

    def __init__(self, pages: CachePages, store: PageStore, states: CachePages | None = None) -> None:
        """pages: of KV. states: of one slot each; None: the model has none."""
        self.page_tokens, self.page_bytes = pages.page_slots, pages.page_bytes
        self._pages = pages
        self._states = states
        self._store = store
        self._writes: SimpleQueue[tuple[bytes, memoryview]] = SimpleQueue()
        self._loads: SimpleQueue[tuple[bytes, CachePages, Slots]] = SimpleQueue()
        self._changed = threading.Condition()  # guards all below
        self._stored = store.keys()
        self._gone: list[bytes] = []
        self._refused: list[bytes] = []
        self._loaded: list[bytes] = []
        self._failed: list[bytes] = []
        self._news = (self._stored, self._gone, self._refused, self._loaded, self._failed)
        self._is_first = True
        self._under_way = 0  # orders not reported yet
        self._loading = 0
        self._loading_since = 0.0
        self._load_s = 0.0
        self._has_warned = False
        for target in (self._write, *[self._load] * READERS):
            threading.Thread(target=target, name="kv-disk", daemon=True).start()

    def write(self, orders: PageOrders) -> None:
        """Between two steps; returns when what is to be written has been copied."""
        with self._changed:
            self._under_way += len(orders.writes) + len(orders.state_writes)
        for key, pages, slots in self._each(orders.writes, orders.state_writes):
            page = memoryview(bytearray(pages.page_bytes))
            pages.gather(slots, page)
            self._writes.put((key, page))

    def load(self, orders: PageOrders) -> None:
        """After `write` and the plan's state copies, whose slots the loads may have."""
        count = len(orders.loads) + len(orders.state_loads)
        with self._changed:
            self._under_way += count
            if count and not self._loading:
                self._loading_since = time.perf_counter()
            self._loading += count
        for load in self._each(orders.loads, orders.state_loads):
            self._loads.put(load)

    def _each(
        self, pages: list[PageCopy], states: list[StateCopy]
    ) -> Iterator[tuple[bytes, CachePages, Slots]]:
        for page in pages:
            yield page.key, self._pages, np.frombuffer(page.slots, np.int32)
        for state in states:
            assert self._states is not None
            yield state.key, self._states, np.array([state.slot], np.int32)

    def start_again(self) -> None:
        """For another router, which knows of no page and of no order. Returns when no load writes to slots any more:
        they may be anybody's then. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._under_way, LOST_ROUTER_WAIT_S):
                raise TimeoutError("the disk of the disk tier does not answer")
            for keys in self._news:
                keys.clear()
            self._stored += self._store.keys()
            self._is_first = True
            self._load_s = 0.0

    def report(self, *, may_wait: bool = False) -> PageReport | None:
        """What has happened since the last report; None: nothing. may_wait: for a moment, while orders are under way
        and nothing has happened."""
        with self._changed:
            if may_wait and self._under_way and not self._has_news:
                self._changed.wait_for(lambda: self._has_news, IDLE_WAIT_S)
            if not self._has_news:
                return None
            self._is_first = False
            self._count_load_time()
            report = PageReport(
                stored=b"".join(self._stored),
                gone=b"".join(self._gone),
                refused=b"".join(self._refused),
                loaded=b"".join(self._loaded),
                failed=b"".join(self._failed),
                load_ms=self._load_s * 1e3,
            )
            for keys in self._news:
                keys.clear()
            self._load_s = 0.0
            return report

    @property
    def _has_news(self) -> bool:
        return self._is_first or any(self._news)

    def _write(self) -> None:
        while True:
            key, page = self._writes.get()
            try:
                gone = self._store.write(key, page)
            except OSError as error:
                self._warn(error)
                self._done(refused=key)
            else:
                self._done(stored=key, gone=gone)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("the disk tier cannot write: %s. It will be tried again; this is said once", error)

    def _load(self) -> None:
        of_kv = memoryview(bytearray(self._pages.page_bytes))
        while True:
            key, pages, slots = self._loads.get()
            page = of_kv if pages is self._pages else memoryview(bytearray(pages.page_bytes))
            if self._store.read(key, page):
                pages.scatter(slots, page)
                self._done(loaded=key)
            else:
                self._done(failed=key)

    def _done(
        self,
        *,
        stored: bytes | None = None,
        gone: list[bytes] | None = None,
        refused: bytes | None = None,
        loaded: bytes | None = None,
        failed: bytes | None = None,
    ) -> None:
        with self._changed:
            self._under_way -= 1
            if loaded is not None or failed is not None:
                self._loading -= 1
                if not self._loading:
                    self._load_s += time.perf_counter() - self._loading_since
            for key, keys in (
                (stored, self._stored),
                (refused, self._refused),
                (loaded, self._loaded),
                (failed, self._failed),
            ):
                if key is not None:
                    keys.append(key)
            self._gone += gone or []
            self._changed.notify()

    def _count_load_time(self) -> None:
        """Up to now, where pages are still being loaded."""
        if self._loading:
            now = time.perf_counter()
            self._load_s += now - self._loading_since
            self._loading_since = now

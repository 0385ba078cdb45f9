"""Moves KV pages and recurrent states between slots, RAM and disk on threads, so that no step waits for a disk.

A write is copied out of its slots before rows of the same plan can overwrite them; on a GPU the copy is launched,
and a thread waits for it. With a RAM tier the copy stays there; else a thread writes it to disk. Other threads load
pages into their slots while steps use other slots. The router limits the orders in progress.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch

from moeserve.kv.cache_pages import CachePages, Move, Slots, Wait
from moeserve.kv.disk.store import PageStore
from moeserve.kv.host_blocks import HostBlocks, HostPage
from moeserve.kv.ram_store import RamStore
from moeserve.messages.pages import PAGE_KEY_BYTES, PageCopy, PageOrders, PageReport, StateCopy, Tier
from moeserve.worker.tiers.tier_log import TierLog

MOST_AT_ONCE = 64  # most pages loaded from RAM between two reports
DISK_READERS = 2  # two, because checksums take as long as reading from a fast disk
LOST_ROUTER_WAIT_S = 10.0  # wait for the orders of a lost router
IDLE_WAIT_S = 0.01  # how long a plan without rows waits for news

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The stores of pages: at least one of RAM and disk."""

    buffers: HostBlocks  # buffers of pages on their way to disk, if there is no RAM tier
    ram: RamStore | None
    disk: PageStore | None

    @property
    def names(self) -> list[Tier]:
        found: list[Tier] = []
        if self.ram is not None:
            found.append("ram")
        if self.disk is not None:
            found.append("disk")
        return found


class WrongSlots(Protocol):
    """Knows which slots have KV or states that must not be kept."""

    def is_wrong(self, slots: Slots, *, states: bool) -> bool:
        """Returns whether any of these KV slots, or state slots, has a wrong content."""


class _Copied(NamedTuple):
    """Pages that are copied out of their slots when `wait` returns."""

    wait: Wait
    keys: list[bytes]
    pages: list[HostPage]


class _Load(NamedTuple):
    key: bytes
    to: CachePages
    slots: Slots
    page: HostPage | None  # in RAM; None: on disk
    mark: object


class PageMover:
    """`write`, `load` and `report` may only be called by the thread that executes plans. The threads are daemons: a
    hanging disk does not keep the process from ending."""

    def __init__(
        self, pages: CachePages, tiers: Tiers, write_bytes: int, states: CachePages | None = None
    ) -> None:
        """pages: of KV. states: pages of one state slot each; None if the model has no recurrent state. write_bytes:
        see WorkerReady."""
        self.page_tokens, self.page_bytes = pages.page_slots, pages.page_bytes
        self.write_bytes = write_bytes
        self.tiers = tiers.names
        self._pages, self._states = pages, states
        self._ram, self._disk, self._buffers = tiers.ram, tiers.disk, tiers.buffers
        self._copied: SimpleQueue[_Copied] = SimpleQueue()
        self._to_disk: SimpleQueue[bytes] = SimpleQueue()
        self._ram_loads: SimpleQueue[_Load] = SimpleQueue()
        self._disk_loads: SimpleQueue[_Load] = SimpleQueue()
        self._changed = threading.Condition()  # guards the attributes below
        self._ram_log, self._disk_log = TierLog(), TierLog()
        self._failed: list[bytes] = []
        self._is_first = True
        self._under_way = 0  # orders not reported yet
        self._has_warned = False
        self._list_all()
        targets: list[Callable[[], None]] = [self._write]
        if self._ram is not None:
            targets += [self._load_from_ram, self._copy_to_disk][: len(self.tiers)]
        if self._disk is not None:
            targets += [self._load_from_disk] * DISK_READERS
        for target in targets:
            threading.Thread(target=target, name="kv-pages", daemon=True).start()

    def _list_all(self) -> None:
        if self._ram is not None:
            self._ram_log.stored += self._ram.keys()
        if self._disk is not None:
            self._disk_log.stored += self._disk.keys()

    # ---------------------------------------------------------------- orders

    def write(self, orders: PageOrders, wrong: WrongSlots | None = None) -> None:
        """Copies pages out of their slots, between two steps; later work may overwrite the slots. Also starts the
        copies of pages from RAM to disk, and notes which pages in RAM were used. wrong: pages and states of slots for
        which it says so are skipped, which is reported; None: none are."""
        if self._ram is not None and orders.used:
            used = orders.used
            self._ram.use(used[at : at + PAGE_KEY_BYTES] for at in range(0, len(used), PAGE_KEY_BYTES))
        with self._changed:
            self._under_way += len(orders.writes) + len(orders.state_writes) + len(orders.to_disk)
        for source, copies in self._kinds(orders.writes, orders.state_writes):
            keys: list[bytes] = []
            moves: list[Move] = []
            for key, slots in copies:
                if wrong is not None and wrong.is_wrong(slots, states=source is self._states):
                    self._tell((self._disk_log if self._ram is None else self._ram_log).skipped, [key])
                    continue
                page = self._room_for(key, source.page_bytes)
                if page is not None:
                    keys.append(key)
                    moves.append(Move(slots, page))
            if moves:
                self._copied.put(_Copied(source.out(moves), keys, [page for _, page in moves]))
        for key in orders.to_disk:
            self._to_disk.put(key)

    def _room_for(self, key: bytes, num_bytes: int) -> HostPage | None:
        """Reserves memory for a page; None if there is none, which is reported."""
        gone: list[bytes] = []
        if self._ram is not None:
            page, gone = self._ram.reserve(key, num_bytes)
        else:
            page = self._buffers.take(num_bytes)
        self._tell(self._ram_log.gone, gone, ends=0)
        if page is None:
            self._tell((self._disk_log if self._ram is None else self._ram_log).skipped, [key])
        return page

    def load(self, orders: PageOrders) -> None:
        """Starts loads. Must be called after `write` and the plan's state copies, because loads may reuse their
        slots."""
        for to, copies in self._kinds(orders.loads, orders.state_loads):
            mark = to.mark() if copies else None
            for key, slots in copies:
                page = None if self._ram is None else self._ram.get(key)
                with self._changed:
                    if page is None and self._disk is None:
                        self._failed.append(key)
                        continue
                    self._under_way += 1
                    if page is None:
                        self._disk_log.loads_begin()
                (self._disk_loads if page is None else self._ram_loads).put(_Load(key, to, slots, page, mark))

    def _kinds(
        self, pages: Sequence[PageCopy], states: Sequence[StateCopy]
    ) -> Iterator[tuple[CachePages, list[tuple[bytes, Slots]]]]:
        yield self._pages, [(page.key, np.frombuffer(page.slots, np.int32)) for page in pages]
        if states:
            assert self._states is not None
            yield self._states, [(state.key, np.array([state.slot], np.int32)) for state in states]

    # ---------------------------------------------------------------- reports

    def start_again(self) -> None:
        """Restarts for another router, which knows of no page and no order. Returns when no load writes to slots any
        more, because they may belong to other requests then. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._under_way, LOST_ROUTER_WAIT_S):
                raise TimeoutError("the tiers of the prefix cache do not answer")
            self._take_report()
            self._list_all()
            self._is_first = True

    def report(self, *, may_wait: bool = False) -> PageReport | None:
        """Returns the news since the last report; None if there is none. may_wait: if there is no news but orders
        are in progress, wait briefly."""
        with self._changed:
            if may_wait and self._under_way and not self._has_news:
                self._changed.wait_for(lambda: self._has_news, IDLE_WAIT_S)
            if not self._has_news:
                return None
            self._is_first = False
            return self._take_report()

    def _take_report(self) -> PageReport:
        report = PageReport(self._ram_log.take(), self._disk_log.take(), b"".join(self._failed))
        self._failed.clear()
        return report

    @property
    def _has_news(self) -> bool:
        return self._is_first or bool(self._failed) or self._ram_log.has_news or self._disk_log.has_news

    def _tell(self, news: list[bytes], keys: Sequence[bytes], *, ends: int = 1) -> None:
        """Adds keys to the report. ends: number of orders that end with each."""
        if keys:
            with self._changed:
                news += keys
                self._under_way -= ends * len(keys)
                self._changed.notify()

    # ---------------------------------------------------------------- threads

    def _write(self) -> None:
        while True:
            wait, keys, pages = self._copied.get()
            wait()
            for key, page in zip(keys, pages, strict=True):
                if self._ram is not None:
                    self._ram.commit(key)
                else:
                    self._write_to_disk(key, page)
                    self._buffers.give(page)
            if self._ram is not None:
                self._tell(self._ram_log.stored, keys)

    def _copy_to_disk(self) -> None:
        assert self._ram is not None
        while True:
            key = self._to_disk.get()
            page = self._ram.get(key)
            if page is None:
                self._tell(self._disk_log.skipped, [key])
            else:
                self._write_to_disk(key, page)
                self._ram.release(key)

    def _write_to_disk(self, key: bytes, page: HostPage) -> None:
        assert self._disk is not None
        try:
            gone = self._disk.write(key, _view(page.joined()))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the disk tier cannot write: %s. It will be tried again; this is said once", error
                )
            self._tell(self._disk_log.refused, [key])
        else:
            self._tell(self._disk_log.gone, gone, ends=0)
            self._tell(self._disk_log.stored, [key])

    def _load_from_ram(self) -> None:
        assert self._ram is not None
        while True:
            loads = [self._ram_loads.get()]
            try:
                while len(loads) < MOST_AT_ONCE:
                    loads.append(self._ram_loads.get_nowait())
            except Empty:
                pass
            # Wait for earlier steps first, so that their time does not count as the tier's.
            loads[-1].to.reach(loads[-1].mark)
            with self._changed:
                self._ram_log.loads_begin(len(loads))
            for to in (self._pages, self._states):
                of_kind = [load for load in loads if load.to is to]
                if of_kind:
                    moves = [Move(load.slots, load.page) for load in of_kind if load.page is not None]
                    self._put(of_kind, moves, self._ram_log)
                for load in of_kind:
                    self._ram.release(load.key)

    def _load_from_disk(self) -> None:
        assert self._disk is not None
        of_kv = self._buffer(self.page_bytes)
        while True:
            load = self._disk_loads.get()
            page = of_kv if load.to is self._pages else self._buffer(load.to.page_bytes)
            if self._disk.read(load.key, _view(page)):
                self._put([load], [Move(load.slots, HostPage([page], []))], self._disk_log)
            else:
                with self._changed:
                    self._disk_log.loads_end()
                    self._tell(self._failed, [load.key])

    def _put(self, loads: Sequence[_Load], moves: Sequence[Move], tier: TierLog) -> None:
        """Copies pages into their slots; the newest load's mark covers all."""
        loads[-1].to.into(moves, loads[-1].mark)
        with self._changed:
            tier.loads_end(len(loads))
            self._tell(tier.loaded, [load.key for load in loads])

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._buffers.is_pinned)


def _view(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy().data)

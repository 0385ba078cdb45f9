"""The worker's part of the tiers for the router core's tests: pages that come late, fail, or go."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from typing import TypeVar

from moeserve.messages.pages import PAGE_KEY_BYTES, PageOrders, PageReport, Tier, TierNews

T = TypeVar("T")
# What a slot holds while a load may write to it, and before anything is written: no hash is -1.
UNREADABLE = -1


class _News:
    """A TierNews that is being made."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.gone: list[bytes] = []
        self.refused: list[bytes] = []
        self.skipped: list[bytes] = []
        self.loaded: list[bytes] = []

    def message(self, load_ms: float) -> TierNews:
        return TierNews(
            stored=b"".join(self.stored),
            gone=b"".join(self.gone),
            refused=b"".join(self.refused),
            skipped=b"".join(self.skipped),
            loaded=b"".join(self.loaded),
            load_ms=load_ms * len(self.loaded),
        )


class VirtualTiers:
    """Pages by key: for each token what its KV slot held; and states, of one number each. The disk outlives the
    worker."""

    def __init__(
        self,
        page_tokens: int,
        seed: int = 0,
        *,
        faults: float = 0.0,
        instant: bool = True,
        ram_pages: int = 0,
        has_disk: bool = True,
    ) -> None:
        """faults: how often a page fails to be written or loaded, or goes. Without `instant`, pages take their time.
        ram_pages: that the tier in RAM holds, states included; 0: there is none."""
        self.pages: dict[bytes, list[int]] = {}  # on disk
        self.ram: OrderedDict[bytes, list[int]] = OrderedDict()  # the least recently used first
        self.load_ms = 0.0  # that each page takes, as the worker measures it
        self.num_loads = 0
        self.faults = faults
        self.page_tokens = page_tokens
        self.is_instant = instant
        self.tiers: tuple[Tier, ...] = ("ram",) * (ram_pages > 0) + ("disk",) * has_disk  # type: ignore[assignment]
        self._ram_pages = ram_pages
        self._rng = random.Random(seed)
        self.connect()

    def connect(self, *, is_new: bool = True) -> None:
        """A new worker; or the old one, with another router."""
        self._is_first = True
        if is_new:
            self.ram.clear()
        self._writes: list[tuple[bytes, list[int]]] = []
        self._to_disk: list[bytes] = []
        self._loads: list[tuple[bytes, array[int] | int]] = []  # KV slots, or a state slot

    def write(self, orders: PageOrders, kv: list[int], states: dict[int, int]) -> None:
        for write in orders.writes:
            slots = array("i", write.slots)
            assert len(slots) == self.page_tokens
            self._writes.append((write.key, [kv[slot] for slot in slots]))
        for state in orders.state_writes:
            assert states[state.slot] != UNREADABLE
            self._writes.append((state.key, [states[state.slot]]))
        assert len(self.tiers) == 2 or not orders.to_disk
        self._to_disk += orders.to_disk
        assert len(orders.used) % PAGE_KEY_BYTES == 0
        for at in range(0, len(orders.used), PAGE_KEY_BYTES):
            if (key := orders.used[at : at + PAGE_KEY_BYTES]) in self.ram:
                self.ram.move_to_end(key)

    def load(self, orders: PageOrders, kv: list[int], states: dict[int, int]) -> None:
        for load in orders.loads:
            slots = array("i", load.slots)
            assert len(slots) == self.page_tokens
            assert all(key != load.key for key, _ in self._loads), "a page is loaded twice at once"
            for slot in slots:
                kv[slot] = UNREADABLE
            self._loads.append((load.key, slots))
            self.num_loads += 1
        for state in orders.state_loads:
            assert all(state.key != key for key, _ in self._loads), "a state is loaded twice at once"
            states[state.slot] = UNREADABLE
            self._loads.append((state.key, state.slot))

    def report(self, kv: list[int], states: dict[int, int], *, may_wait: bool) -> PageReport | None:
        """may_wait: something that is under way is done."""
        is_first, self._is_first = self._is_first, False
        ram, disk, failed = _News(), _News(), list[bytes]()
        if is_first:
            ram.stored += self.ram
            disk.stored += self.pages
        for key, held in self._due(self._writes, may_wait):
            if "ram" in self.tiers:
                self._put(key, held, ram)
            else:
                self._put_on_disk(key, held, disk)
        for key in self._due(self._to_disk, may_wait):
            if key in self.ram:
                self._put_on_disk(key, self.ram[key], disk)
            else:
                disk.skipped.append(key)
        for key, slots in self._due(self._loads, may_wait):
            held_now = self.ram.get(key) or self.pages.get(key)
            if held_now is None or self._fails():
                self.ram.pop(key, None)
                self.pages.pop(key, None)
                failed.append(key)
                continue
            if isinstance(slots, int):
                (states[slots],) = held_now
            else:
                for slot, prefix in zip(slots, held_now, strict=True):
                    kv[slot] = prefix
            (ram if key in self.ram else disk).loaded.append(key)
        if self.pages and self._fails():
            key = self._rng.choice(list(self.pages))
            del self.pages[key]
            disk.gone.append(key)
        report = PageReport(ram.message(self.load_ms), disk.message(self.load_ms), b"".join(failed))
        return report if is_first or report != PageReport() else None

    def _put(self, key: bytes, held: list[int], news: _News) -> None:
        """In RAM."""
        assert self.ram.get(key, held) == held, "a key stands for two different pages"
        if key not in self.ram and len(self.ram) == self._ram_pages:
            if self._fails():
                news.skipped.append(key)
                return
            news.gone.append(self.ram.popitem(last=False)[0])
        self.ram[key] = held
        news.stored.append(key)

    def _put_on_disk(self, key: bytes, held: list[int], news: _News) -> None:
        if self._rng.random() < self.faults / 20:  # each of them stops all writing for a while
            news.refused.append(key)
        else:
            assert self.pages.get(key, held) == held, "a key stands for two different pages"
            self.pages[key] = held
            news.stored.append(key)

    def _fails(self) -> bool:
        return self._rng.random() < self.faults

    def _due(self, orders: list[T], may_wait: bool) -> list[T]:
        if not orders:
            return []
        count = len(orders) if self.is_instant else self._rng.randint(min(may_wait, len(orders)), len(orders))
        due, orders[:] = orders[:count], orders[count:]
        return due

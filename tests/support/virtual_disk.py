"""The worker's part of the disk tier for the router core's tests: pages that come late, fail, or go."""

from __future__ import annotations

import random
from array import array
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moeserve.messages.pages import PageOrders, PageReport

T = TypeVar("T")
UNREADABLE = (
    -1
)  # what a slot holds while a load may write to it, and before anything is written: no hash is -1


class VirtualDisk:
    """Pages by key: for each token what its KV slot held. It outlives the worker."""

    def __init__(self, page_tokens: int, seed: int = 0, *, faults: float = 0.0, instant: bool = True) -> None:
        """faults: how often a page fails to be written or loaded, or goes. Without `instant`, pages take their time."""
        self.pages: dict[bytes, list[int]] = {}  # and states, of one number each
        self.load_ms = 0.0  # that each page takes, as the worker measures it
        self.num_loads = 0
        self.faults = faults
        self.page_tokens = page_tokens
        self.is_instant = instant
        self._rng = random.Random(seed)
        self.connect()

    def connect(self) -> None:
        """A new worker."""
        self._is_first = True
        self._writes: list[tuple[bytes, list[int]]] = []
        self._loads: list[tuple[bytes, array[int] | int]] = []  # KV slots, or a state slot

    def write(self, orders: PageOrders, kv: npt.NDArray[np.int64], states: dict[int, int]) -> None:
        for write in orders.writes:
            slots = array("i", write.slots)
            assert len(slots) == self.page_tokens
            self._writes.append((write.key, kv[slots].tolist()))
        for state in orders.state_writes:
            assert states[state.slot] != UNREADABLE
            self._writes.append((state.key, [states[state.slot]]))

    def load(self, orders: PageOrders, kv: npt.NDArray[np.int64], states: dict[int, int]) -> None:
        for load in orders.loads:
            slots = array("i", load.slots)
            assert len(slots) == self.page_tokens
            assert all(key != load.key for key, _ in self._loads), "a page is loaded twice at once"
            kv[slots] = UNREADABLE
            self._loads.append((load.key, slots))
            self.num_loads += 1
        for state in orders.state_loads:
            assert all(state.key != key for key, _ in self._loads), "a state is loaded twice at once"
            states[state.slot] = UNREADABLE
            self._loads.append((state.key, state.slot))

    def report(
        self, kv: npt.NDArray[np.int64], states: dict[int, int], *, may_wait: bool
    ) -> PageReport | None:
        """may_wait: something that is under way is done."""
        is_first, self._is_first = self._is_first, False
        stored = list(self.pages) if is_first else []
        gone: list[bytes] = []
        refused: list[bytes] = []
        loaded: list[bytes] = []
        failed: list[bytes] = []
        for key, held in self._due(self._writes, may_wait):
            if self._rng.random() < self.faults / 20:  # each of them stops all writing for a while
                refused.append(key)
            else:
                assert self.pages.get(key, held) == held, "a key stands for two different pages"
                self.pages[key] = held
                stored.append(key)
        for key, slots in self._due(self._loads, may_wait):
            if key not in self.pages or self._fails():
                self.pages.pop(key, None)
                failed.append(key)
            else:
                if isinstance(slots, int):
                    (states[slots],) = self.pages[key]
                else:
                    kv[slots] = self.pages[key]
                loaded.append(key)
        if self.pages and self._fails():
            key = self._rng.choice(list(self.pages))
            del self.pages[key]
            gone.append(key)
        if not is_first and not any((stored, gone, refused, loaded, failed)):
            return None
        return PageReport(
            stored=b"".join(stored),
            gone=b"".join(gone),
            refused=b"".join(refused),
            loaded=b"".join(loaded),
            failed=b"".join(failed),
            load_ms=self.load_ms * (len(loaded) + len(failed)),
        )

    def _fails(self) -> bool:
        return self._rng.random() < self.faults

    def _due(self, orders: list[T], may_wait: bool) -> list[T]:
        count = len(orders) if self.is_instant else self._rng.randint(min(may_wait, len(orders)), len(orders))
        due, orders[:] = orders[:count], orders[count:]
        return due

"""The disk tier in virtual time: pages are read one after another at a rate, and written behind in no time."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from moeserve.messages.pages import PageOrders, PageReport


@dataclass(frozen=True, slots=True)
class DiskTierModel:
    """What a simulated server has as --kv-disk."""

    tokens: int  # whose KV it holds; 0: there is no disk
    tokens_per_s: float  # that are read


class SimulatedDisk:
    """The worker's side of the tier. Pages count alike; states of recurrent layers take no time and no room. The least
    recently used page goes first."""

    def __init__(self, model: DiskTierModel, page_tokens: int) -> None:
        self._most_pages = model.tokens // page_tokens
        self._page_s = page_tokens / model.tokens_per_s
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._states: set[bytes] = set()
        self._stored: list[bytes] = []  # since the last report
        self._gone: list[bytes] = []
        self._loads: deque[tuple[float, bytes, float]] = (
            deque()
        )  # (when it is there, key, seconds of reading)
        self._free_at = 0.0
        self._is_first = True

    def order(self, orders: PageOrders, now: float) -> None:
        for write in orders.writes:
            self._write(write.key)
        for state in orders.state_writes:
            self._states.add(state.key)
            self._stored.append(state.key)
        for load in orders.loads:
            self._load(load.key, now, self._page_s)
        for state in orders.state_loads:
            self._load(state.key, now, 0.0)

    def _write(self, key: bytes) -> None:
        if len(self._pages) == self._most_pages:
            self._gone.append(self._pages.popitem(last=False)[0])
        self._pages[key] = None
        self._stored.append(key)

    def _load(self, key: bytes, now: float, seconds: float) -> None:
        self._free_at = max(self._free_at, now) + seconds
        self._loads.append((self._free_at, key, seconds))

    @property
    def next_at(self) -> float | None:
        """When the next load is there, in virtual seconds; None: none is under way."""
        return self._loads[0][0] if self._loads else None

    def report(self, now: float) -> PageReport | None:
        """What has happened up to `now` since the last report; None: nothing."""
        loaded: list[bytes] = []
        failed: list[bytes] = []
        seconds = 0.0
        while self._loads and self._loads[0][0] <= now:
            _, key, each = self._loads.popleft()
            seconds += each
            if key in self._pages:
                self._pages.move_to_end(key)
            (loaded if key in self._pages or key in self._states else failed).append(key)
        if not (loaded or failed or self._stored or self._gone or self._is_first):
            return None
        self._is_first = False
        report = PageReport(
            stored=b"".join(self._stored),
            gone=b"".join(self._gone),
            loaded=b"".join(loaded),
            failed=b"".join(failed),
            load_ms=seconds * 1e3,
        )
        self._stored, self._gone = [], []
        return report

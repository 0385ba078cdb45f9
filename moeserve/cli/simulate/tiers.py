"""Simulates the tiers behind the KV pool in virtual time. Each reads pages and states one after another at one rate,
and writes them later at another. Data can be read, and is reported, when all of it has been written."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from moeserve.messages.pages import PAGE_KEY_BYTES, TIERS, PageOrders, PageReport, Tier, TierNews


@dataclass(frozen=True, slots=True)
class TierModel:
    """A simulated server's --kv-ram or --kv-disk."""

    tokens: int  # capacity in tokens
    tokens_per_s: float  # read rate
    written_per_s: float = math.inf  # write rate
    state_tokens: float = 0.0  # the number of tokens whose KV is as large as one recurrent state


class _Job(NamedTuple):
    """A page or a state that is being read or written."""

    done_at: float
    key: bytes
    seconds: float


class _Tier:
    """One tier. All pages have the same size, and states of recurrent layers take no room. The least recently used page
    is dropped first."""

    def __init__(self, model: TierModel, page_tokens: int) -> None:
        self._most_pages = model.tokens // page_tokens
        self._page_tokens, self._state_tokens = page_tokens, model.state_tokens
        self._read_s, self._write_s = 1 / model.tokens_per_s, 1 / model.written_per_s  # per token
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._states: set[bytes] = set()
        self._stored: list[bytes] = []  # since the last report
        self._gone: list[bytes] = []
        self._skipped: list[bytes] = []
        self._loads: deque[_Job] = deque()
        self._writes: deque[tuple[_Job, bool]] = deque()  # (job, is it a state)
        self._read_until = self._written_until = 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages or key in self._states

    def write(self, key: bytes, now: float, *, is_state: bool) -> float:
        """Starts a write, and returns the seconds that it takes."""
        seconds = self._write_s * (self._state_tokens if is_state else self._page_tokens)
        self._written_until = max(self._written_until, now) + seconds
        self._writes.append((_Job(self._written_until, key, seconds), is_state))
        return seconds

    def _put(self, key: bytes, *, is_state: bool) -> None:
        if is_state:
            self._states.add(key)
        elif key not in self._pages:
            if len(self._pages) == self._most_pages:
                self._gone.append(self._pages.popitem(last=False)[0])
            self._pages[key] = None
        self._stored.append(key)

    def skip(self, key: bytes) -> None:
        """Notes a page or state that cannot be written, because its source no longer has it."""
        self._skipped.append(key)

    def is_state(self, key: bytes) -> bool:
        return key in self._states

    def use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)

    def load(self, key: bytes, now: float) -> None:
        seconds = self._read_s * (self._state_tokens if key in self._states else self._page_tokens)
        self._read_until = max(self._read_until, now) + seconds
        self._loads.append(_Job(self._read_until, key, seconds))

    @property
    def next_at(self) -> float | None:
        times = [
            job.done_at for job in [*islice(self._loads, 1), *(job for job, _ in islice(self._writes, 1))]
        ]
        return min(times, default=None)

    def news(self, now: float, failed: list[bytes]) -> TierNews:
        """Returns the changes up to `now` since the last call. failed: receives the keys of loads that are not in the
        tier any more."""
        while self._writes and self._writes[0][0].done_at <= now:
            job, is_state = self._writes.popleft()
            self._put(job.key, is_state=is_state)
        loaded: list[bytes] = []
        seconds = 0.0
        while self._loads and self._loads[0].done_at <= now:
            _, key, each = self._loads.popleft()
            seconds += each
            if key in self:
                self.use([key])
                loaded.append(key)
            else:
                failed.append(key)
        news = TierNews(
            stored=b"".join(self._stored),
            gone=b"".join(self._gone),
            skipped=b"".join(self._skipped),
            loaded=b"".join(loaded),
            load_ms=seconds * 1e3,
        )
        for keys in (self._stored, self._gone, self._skipped):
            keys.clear()
        return news


class SimulatedTiers:
    """The worker's side of the tiers. There is at least one."""

    def __init__(self, models: Mapping[Tier, TierModel], page_tokens: int) -> None:
        self._tiers: dict[Tier, _Tier] = {
            name: _Tier(models[name], page_tokens) for name in TIERS if name in models
        }
        self._in_order = list(self._tiers.values())  # the fastest first
        self._is_first = True

    def order(self, orders: PageOrders, now: float) -> float:
        """Starts the plan's page orders. Returns the seconds by which the plan's step is longer, because data for RAM
        is copied out before it."""
        fastest, slowest = self._in_order[0], self._in_order[-1]
        used = orders.used
        fastest.use(used[at : at + PAGE_KEY_BYTES] for at in range(0, len(used), PAGE_KEY_BYTES))
        written = 0.0
        for write in orders.writes:
            written += fastest.write(write.key, now, is_state=False)
        for state in orders.state_writes:
            written += fastest.write(state.key, now, is_state=True)
        for key in orders.to_disk:
            if key in fastest:
                slowest.write(key, now, is_state=fastest.is_state(key))
            else:
                slowest.skip(key)
        for key in [*(page.key for page in orders.loads), *(state.key for state in orders.state_loads)]:
            tier = next((tier for tier in self._in_order if key in tier), slowest)
            tier.load(key, now)
        return written if "ram" in self._tiers else 0.0

    @property
    def next_at(self) -> float | None:
        """Returns when the next page is read or written, in virtual seconds; None: nothing is under way."""
        return min((tier.next_at for tier in self._in_order if tier.next_at is not None), default=None)

    def report(self, now: float) -> PageReport | None:
        """Returns the changes up to `now` since the last report; None: there are none."""
        failed: list[bytes] = []
        news = {name: tier.news(now, failed) for name, tier in self._tiers.items()}
        report = PageReport(
            ram=news.get("ram", TierNews()), disk=news.get("disk", TierNews()), failed=b"".join(failed)
        )
        is_first, self._is_first = self._is_first, False
        return report if is_first or report != PageReport() else None

"""What router and worker tell each other about the tiers of the prefix cache behind the KV pool: RAM and disk.

A page is a run of tokens' KV that is moved as a whole. Its key stands for these tokens and all before them. Of a model
with recurrent state, the state after all tokens of a key is moved in the same way, under a key of its own. Keys are
joined to one bytes object where there may be many.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

PAGE_KEY_BYTES: Final = 32
WRITES_UNDER_WAY: Final = 8  # at most, times WorkerReady.kv_write_bytes

# The fastest first. Where there are both, pages are written to RAM, and copied from there to disk.
Tier = Literal["ram", "disk"]
TIERS: Final[tuple[Tier, ...]] = ("ram", "disk")


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """A page of KV, and the KV slots that it comes from or goes to."""

    key: bytes  # PAGE_KEY_BYTES: stands for the page's tokens and all before them
    slots: bytes  # int32, WorkerReady.kv_page_tokens of them


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """A recurrent state, and the state slot that it comes from or goes to."""

    key: bytes  # PAGE_KEY_BYTES: stands for all tokens that the state has consumed
    slot: int


class PageOrders(msgspec.Struct, frozen=True, array_like=True):
    """What the tiers move. What is written is copied out of its slots before the state copies, the loads and the
    rows of the plan, after the rows of all plans before. A load writes to its slots at any time after the plan's state
    copies until a PageReport names its key; no copy and no row uses these slots meanwhile."""

    writes: list[PageCopy] = []  # to the fastest tier
    loads: list[PageCopy] = []  # from the fastest tier that has the page
    state_writes: list[StateCopy] = []
    state_loads: list[StateCopy] = []
    to_disk: list[bytes] = []  # keys of pages and states in RAM, which are copied to disk
    used: bytes = b""  # keys of what becomes the most recently used of RAM, the last one most


class TierNews(msgspec.Struct, frozen=True, array_like=True):
    """What has become of pages in one tier since the last report: keys, one after another."""

    stored: bytes = b""  # there from now on
    gone: bytes = b""  # no longer there
    refused: bytes = b""  # ordered to be written, which failed: the disk is full, or broken
    # Ordered to be written, for which there was no room or which was not in RAM any more.
    skipped: bytes = b""
    loaded: bytes = b""  # their KV is in the slots that the order named
    load_ms: float = 0.0  # time in which at least one page was being read


class PageReport(msgspec.Struct, frozen=True, array_like=True):
    """What has become of pages since the last report. The first report of a worker has all pages of each tier as
    `stored`."""

    ram: TierNews = TierNews()
    disk: TierNews = TierNews()
    failed: bytes = b""  # ordered to be loaded, which failed; they are in no tier any more


class TierCounts(msgspec.Struct, frozen=True, array_like=True):
    """A tier's part of a LoadReport: totals since the start, but for `pages`."""

    pages: int = 0  # in the tier now, states included
    bytes_written: int = 0
    bytes_read: int = 0
    tokens: int = 0  # whose KV came from the tier
    load_ms: float = 0.0  # time in which pages were being read
    declined: int = 0  # prompts that were recomputed because that was expected to be faster
    failed_pages: int = 0  # corrupt, truncated or unreadable

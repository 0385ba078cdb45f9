"""Messages between router and worker about the tiers of the prefix cache behind the KV pool: RAM and disk.

A page is the KV of some consecutive tokens, which is moved as a whole. Its key identifies these tokens and all before
them. If the model has recurrent layers, the state after all tokens of a key is moved in the same way, under its own
key. Long lists of keys are one bytes object, key after key.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from moeserve.messages.metric import Metric

PAGE_KEY_BYTES: Final = 32
WRITES_UNDER_WAY: Final = 8  # at most, times WorkerReady.kv_write_bytes

# The fastest first. If both exist, pages are written to RAM, and copied from there to disk.
Tier = Literal["ram", "disk"]
TIERS: Final[tuple[Tier, ...]] = ("ram", "disk")


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """A page of KV, and the KV slots that it comes from or goes to."""

    key: bytes  # PAGE_KEY_BYTES: identifies the page's tokens and all before them
    slots: bytes  # int32, WorkerReady.kv_page_tokens of them


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """A recurrent state, and the state slot that it comes from or goes to."""

    key: bytes  # PAGE_KEY_BYTES: identifies all tokens that the state has consumed
    slot: int


class PageOrders(msgspec.Struct, frozen=True, array_like=True):
    """Orders to move pages and states. Pages to be written are copied out of their slots after the rows of all earlier
    plans, and before this plan's state copies, loads and rows. A load writes to its slots at any time between the
    plan's state copies and the PageReport that names its key; meanwhile no copy and no row uses these slots."""

    writes: list[PageCopy] = []  # to the fastest tier
    loads: list[PageCopy] = []  # from the fastest tier that has the page
    state_writes: list[StateCopy] = []
    state_loads: list[StateCopy] = []
    to_disk: list[bytes] = []  # keys of pages and states in RAM, which are copied to disk
    used: bytes = b""  # keys that become the most recently used in RAM, the last one most


class TierNews(msgspec.Struct, frozen=True, array_like=True):
    """News of pages in one tier since the last report: keys, one after another."""

    stored: bytes = b""  # now in the tier
    gone: bytes = b""  # no longer in the tier
    refused: bytes = b""  # could not be written: the disk is full or broken
    # Not written: there was no room, or the page was no longer in RAM.
    skipped: bytes = b""
    loaded: bytes = b""  # their KV is in the slots that the order named
    load_ms: float = 0.0  # time in which at least one page was being read


class PageReport(msgspec.Struct, frozen=True, array_like=True):
    """News of pages since the last report. The first report of a worker has all pages of each tier as `stored`."""

    ram: TierNews = TierNews()
    disk: TierNews = TierNews()
    failed: bytes = b""  # could not be loaded; they are no longer in any tier


class TierCounts(msgspec.Struct, array_like=True):
    """A tier's part of a LoadReport; all zeros if the tier does not exist."""

    pages: Annotated[int, Metric("gauge", "pages", "Pages of KV, and recurrent states, in {}.")] = 0
    bytes_written: Annotated[
        int, Metric("counter", "written_bytes", "Bytes of KV written to {}.", "bytes")
    ] = 0
    bytes_read: Annotated[int, Metric("counter", "read_bytes", "Bytes of KV read from {}.", "bytes")] = 0
    tokens: Annotated[
        int, Metric("counter", "tokens", "Prompt tokens whose KV was read from {}.", "tokens")
    ] = 0
    load_ms: Annotated[
        float, Metric("counter", "load_seconds", "Time in which KV was being read from {}.", "ms")
    ] = 0.0
    declined: Annotated[
        int,
        Metric(
            "counter",
            "declined",
            "Prompts in {} that were recomputed because that was expected to be faster.",
        ),
    ] = 0
    failed_pages: Annotated[
        int,
        Metric(
            "counter",
            "failed_pages",
            "Pages in {} that were corrupt, truncated or unreadable, and were recomputed.",
        ),
    ] = 0

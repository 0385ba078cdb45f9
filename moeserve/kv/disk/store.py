"""All segments of a folder: pages by key, within a budget of bytes. The least recently used segment is deleted
first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moeserve.config.units import GIB
from moeserve.kv.disk.fingerprint import Fingerprint
from moeserve.kv.disk.segment import (
    IrregularFileError,
    Segment,
    SegmentError,
    read_header,
    segment_numbers,
    segment_path,
    size_of,
)

DEFAULT_GIB = 10.0  # default of --kv-disk-gib
MOST_SEGMENT_BYTES = GIB
LEAST_SEGMENTS = 16  # a segment has at most this fraction of the budget, so that one eviction deletes little
TOUCH_EVERY_S = 60.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    path: Path
    num_bytes: int
    last_used: float  # seconds since the epoch
    segment: Segment | None  # None: from another model or version, or damaged
    touched: float = field(default=0.0)  # when the file's modification time was last set


class PageStore:
    """Pages with one or several fingerprints, each of which has a fixed page size. Any thread may call `read`; one
    thread calls `write`."""

    def __init__(self, folder: Path, budget_bytes: int, fingerprints: Sequence[Fingerprint]) -> None:
        """Opens the folder's segments; the caller holds the folder's lock. Raises OSError."""
        self._folder = folder
        self._budget = budget_bytes
        self._fingerprints = {fingerprint.page_bytes: fingerprint for fingerprint in fingerprints}
        self._segment_bytes = min(MOST_SEGMENT_BYTES, budget_bytes // LEAST_SEGMENTS)
        self._lock = threading.Lock()  # guards the attributes below
        self._entries: list[_Entry] = []
        self._by_key: dict[bytes, _Entry] = {}
        self._open: dict[int, _Entry] = {}  # page bytes → the segment being written
        self._last_number = 0
        self._has_warned = False
        self._read_folder()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(entry.num_bytes for entry in self._entries)

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._by_key)

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_key)

    def _read_folder(self) -> None:
        foreign = damaged = 0
        for number in segment_numbers(self._folder):
            self._last_number = number
            path = segment_path(self._folder, number)
            segment = None
            try:
                fingerprint = read_header(path)
                if fingerprint == self._fingerprints.get(fingerprint.page_bytes):
                    segment = Segment(path, fingerprint, create=False)
                else:
                    foreign += 1
            except IrregularFileError as error:
                log.warning("the disk tier leaves %s", error)
                continue
            except (SegmentError, OSError) as error:
                log.warning("the disk tier ignores %s", error)
            entry = _Entry(path, size_of(path), _last_used(path), segment)
            self._entries.append(entry)
            if segment is not None:
                damaged += segment.num_damaged
                self._by_key.update(dict.fromkeys(segment.checksums, entry))
        if foreign:
            log.info(
                "the disk tier has %d segments of other models or settings, which are deleted first", foreign
            )
        if damaged:
            log.warning(
                "the disk tier has %d damaged records of pages; these pages are computed again", damaged
            )

    # ---------------------------------------------------------------- reading

    def read(self, key: bytes, page: memoryview) -> bool:
        """Reads the page of `key` into `page`. Returns False if there is none or its checksum does not match; a
        damaged page is forgotten."""
        with self._lock:
            entry = self._by_key.get(key)
        if entry is None or entry.segment is None:
            return False
        try:
            is_whole = entry.segment.read(key, page)
        except OSError as error:
            self._forget(entry, key, str(error))
            return False
        if not is_whole:
            self._forget(entry, key, "a page has changed since it was written")
            return False
        self._use(entry)
        return True

    def _forget(self, entry: _Entry, key: bytes, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "disk tier: %s: %s. Such pages are computed again; further ones are not logged",
                entry.path,
                cause,
            )
        with self._lock:
            if self._by_key.get(key) is entry:
                del self._by_key[key]
            if entry.segment is not None:
                entry.segment.forget(key)

    def _use(self, entry: _Entry) -> None:
        now = time.time()
        with self._lock:
            entry.last_used = now
            is_due = now - entry.touched > TOUCH_EVERY_S
            if is_due:
                entry.touched = now
        if is_due and entry.segment is not None:
            try:
                entry.segment.touch()
            except OSError as error:
                log.debug("%s: its time of use was not noted: %s", entry.path, error)

    # ---------------------------------------------------------------- writing

    def write(self, key: bytes, page: memoryview) -> list[bytes]:
        """Stores a page. Returns the keys of the pages deleted to make room. Raises OSError; the page is then not
        stored."""
        gone = self._make_room(len(page))
        entry = self._writable(len(page))
        assert entry.segment is not None
        entry.segment.append(key, page)
        with self._lock:
            entry.num_bytes = size_of(entry.path)
            entry.last_used = time.time()
            self._by_key[key] = entry
        if entry.num_bytes + len(page) > self._segment_bytes:
            del self._open[len(page)]  # full
        return gone

    def _writable(self, page_bytes: int) -> _Entry:
        entry = self._open.get(page_bytes)
        # If the file was deleted by someone, start a new segment; that fails if the whole folder is gone.
        if entry is not None and entry.path.exists():
            return entry
        self._last_number += 1
        path = segment_path(self._folder, self._last_number)
        segment = Segment(path, self._fingerprints[page_bytes], create=True)
        entry = self._open[page_bytes] = _Entry(path, size_of(path), time.time(), segment)
        with self._lock:
            self._entries.append(entry)
        return entry

    def _make_room(self, num_bytes: int) -> list[bytes]:
        """Deletes segments until `num_bytes` more bytes fit into the budget: unusable segments first, then the least
        recently used."""
        gone: list[bytes] = []
        while self.num_bytes + num_bytes > self._budget and self._entries:
            with self._lock:
                entry = min(self._entries, key=lambda e: (e.segment is not None, e.last_used))
                self._entries.remove(entry)
                mine = [key for key, at in self._by_key.items() if at is entry]
                for key in mine:
                    del self._by_key[key]
            gone += mine
            self._open = {size: each for size, each in self._open.items() if each is not entry}
            for path in (entry.path.with_suffix(".idx"), entry.path):
                path.unlink(missing_ok=True)
        return gone


def _last_used(path: Path) -> float:
    """Returns seconds since the epoch; 0 if the segment was deleted meanwhile."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0

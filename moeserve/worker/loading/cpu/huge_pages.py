"""Moves weights into huge pages where the kernel had none when they were written.

Packed weights ask for huge pages (`madvise`), but the kernel gives none while its free memory is in small pieces, as it
is when files fill the page cache. Weights in small pages are read 0.6 times as fast: the CPU's prefetchers stop at the
end of a page, and its TLB holds few of them (docs/results/cpu-engine.md, "Weights in huge pages").
"""

from __future__ import annotations

import ctypes
import errno
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

from moeserve.config.units import GIB

log = logging.getLogger(__name__)

HUGE_PAGE: Final = 2 << 20  # bytes, on x86-64 and on AArch64 with pages of 4 KiB
# linux/mman.h, from Linux 6.1 on. The C++ engine's own (`kMadviseCollapse`) is for the few weights that `--isa auto`
# measures with; a test compares the two.
MADV_COLLAPSE: Final = 25
_PIECE: Final = 32 * HUGE_PAGE  # bytes of a call, which stops at the first page that fails
_MOST_FAILURES: Final = 32  # pages in a row
# madvise(2): no huge page is free, or the control group's limit of memory is reached. Other errors are the area's own.
_NO_MEMORY: Final = (errno.ENOMEM, errno.EBUSY)
_LEAST_LIMIT_S: Final = 20.0
_LIMIT_S_PER_GIB: Final = 1.0  # four times what it takes where memory is free
_FIRST_NEWS_S: Final = 2.0
_NEWS_S: Final = 20.0
_LEAST_LOGGED: Final = 1 << 28  # bytes of weights; caches hold a part of smaller models
_WARNED_SHARE: Final = 0.9
_SMAPS: Final = Path("/proc/self/smaps")


class End(Enum):
    """Why no more pages are moved. The value: the same for the log, with what helps."""

    ALL_TRIED = "`moeserve doctor` says whether huge pages are enabled"
    REFUSED = (
        "the kernel does not move some of these pages, as none before Linux 6.1; `moeserve doctor` says whether huge "
        "pages are enabled"
    )
    NO_MEMORY = (
        "the kernel had no more of them: free memory is short or in pieces. Run: echo 1 | sudo tee "
        "/proc/sys/vm/compact_memory, then start again"
    )
    TIME = (
        "moving them took so long that it was ended, as it does where memory is in pieces or the machine is busy. Run: "
        "echo 1 | sudo tee /proc/sys/vm/compact_memory, then start again"
    )


@dataclass(frozen=True, slots=True)
class Area:
    """Memory of this process that asks for huge pages; in bytes."""

    start: int
    end: int
    resident: int
    huge: int  # of `resident`

    @property
    def small(self) -> int:
        """The bytes in small pages."""
        return self.resident - self.huge

    @property
    def has_small_pages(self) -> bool:
        """True if at least one huge page is missing. An area that is only partly in use, as slots of experts on disk
        are, has none missing: its other pages stay unallocated."""
        return self.small >= HUGE_PAGE and 10 * self.resident >= 9 * (self.end - self.start)


def areas_of(smaps: Iterable[str]) -> list[Area]:
    """Returns the areas that ask for huge pages. smaps: lines of /proc/PID/smaps (proc(5))."""
    found, span, sizes = list[Area](), (0, 0), dict[str, int]()
    for line in smaps:
        name, *values = line.split()
        if not name.endswith(":"):
            start, _, end = name.partition("-")
            span, sizes = (int(start, 16), int(end, 16)), {}
        elif name == "VmFlags:":
            if "hg" in values:
                found.append(Area(*span, sizes.get("Rss:", 0), sizes.get("AnonHugePages:", 0)))
        elif name in ("Rss:", "AnonHugePages:"):
            sizes[name] = int(values[0]) << 10
    return found


def use_huge_pages() -> None:
    """Moves this process's weights into huge pages, and logs how many of their bytes are there. Takes some 0.25 s a GiB
    that is moved; the limit is four times that, and 20 s at least. A kernel that cannot do it leaves them where they
    are.

    Only before the process is forked: pages that are shared with a child would be copied."""
    areas, end = _own_areas(), End.ALL_TRIED
    if small := [area for area in areas if area.has_small_pages]:
        end = _Move(small).run()
        areas = _own_areas()
    _tell(sum(area.resident for area in areas), sum(area.huge for area in areas), end)


def _tell(resident: int, huge: int, end: End) -> None:
    """Logs the bytes of weights, and how many of them are in huge pages. end: why it is not all of them."""
    if resident < _LEAST_LOGGED:
        return
    if huge >= _WARNED_SHARE * resident or resident - huge < _LEAST_LOGGED:
        log.info("%.2f of %.2f GiB of weights are in huge pages", huge / GIB, resident / GIB)
        return
    log.warning(
        "only %.2f of %.2f GiB of weights are in huge pages; the others are read about 0.6 times as fast: %s",
        huge / GIB,
        resident / GIB,
        end.value,
    )


def _own_areas() -> list[Area]:
    """Returns an empty list where there is no /proc."""
    try:
        # A name of a file there has the file system's bytes, which need not be UTF-8, and may have a carriage return.
        with _SMAPS.open(errors="replace", newline="\n") as lines:
            return areas_of(lines)
    except OSError:
        return []


class _Move:
    """Moves areas into huge pages, and logs its progress if it takes long."""

    def __init__(self, areas: Sequence[Area]) -> None:
        self._areas = areas
        self._bytes = sum(area.small for area in areas)
        self._tried = 0  # bytes
        now = time.monotonic()
        self._deadline = now + max(_LEAST_LIMIT_S, _LIMIT_S_PER_GIB * self._bytes / GIB)
        self._next_news = now + _FIRST_NEWS_S
        self._without_memory = 0  # pages in a row
        self._is_refused = False

    def run(self) -> End:
        """Returns why it ended."""
        for area in self._areas:
            before = self._tried
            if (end := self._area(area)) is not None:
                return end
            self._tried = before + area.small
        return End.REFUSED if self._is_refused else End.ALL_TRIED

    def _area(self, area: Area) -> End | None:
        """Returns None unless nothing more can be moved, of other areas either. An area of which the kernel refuses
        many pages in a row is left: it is of a kind that stays as it is, such as memory that a device has pinned."""
        refused = 0
        for start, size in _pieces(area):
            if self._is_late():
                return End.TIME
            if _collapse(start, size) == 0:
                refused = self._without_memory = 0
                self._tried += size
                continue
            for page in range(start, start + size, HUGE_PAGE):
                if self._is_late():
                    return End.TIME
                error = _collapse(page, HUGE_PAGE)
                self._without_memory = self._without_memory + 1 if error in _NO_MEMORY else 0
                refused = refused + 1 if error and error not in _NO_MEMORY else 0
                self._is_refused = self._is_refused or refused > 0
                if self._without_memory >= _MOST_FAILURES:
                    return End.NO_MEMORY
                if refused >= _MOST_FAILURES:
                    return None
            self._tried += size
        return None

    def _is_late(self) -> bool:
        """Returns whether the time is over. Logs the progress now and then."""
        now = time.monotonic()
        if now > self._next_news:
            self._next_news = now + _NEWS_S
            done = min(self._tried, self._bytes)
            log.info("moving %.1f GiB of weights into huge pages: %.1f done", self._bytes / GIB, done / GIB)
        return now > self._deadline


def _pieces(area: Area) -> Iterator[tuple[int, int]]:
    """Yields the area's addresses and sizes, both multiples of HUGE_PAGE."""
    first = -(-area.start // HUGE_PAGE) * HUGE_PAGE
    last = area.end // HUGE_PAGE * HUGE_PAGE
    for start in range(first, last, _PIECE):
        yield start, min(_PIECE, last - start)


def _collapse(start: int, size: int) -> int:
    """Returns 0 if all of it is in huge pages now, else the error's number."""
    if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_COLLAPSE) == 0:
        return 0
    return ctypes.get_errno()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

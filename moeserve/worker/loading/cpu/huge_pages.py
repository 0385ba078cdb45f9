"""Moves weights into huge pages where the kernel had none when they were written.

Packed weights ask for huge pages (`madvise`), but the kernel gives none while its free memory is in small pieces, as it
is when files fill the page cache. Weights in small pages are read 0.6 times as fast: the CPU's prefetchers stop at the
end of a page, and its TLB holds few of them (docs/results/cpu-engine.md, "Weights in huge pages").
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeserve.config.units import GIB

log = logging.getLogger(__name__)

HUGE_PAGE: Final = 2 << 20  # bytes, on x86-64 and on AArch64 with pages of 4 KiB
_COLLAPSE: Final = 25  # linux/mman.h: MADV_COLLAPSE, from Linux 6.1 on
_PIECE: Final = 32 * HUGE_PAGE  # bytes of a call, which stops at the first page that fails
_MOST_FAILURES: Final = 32  # in a row: the kernel then has no huge pages left
MOST_SECONDS: Final = 20.0
_LEAST_LOGGED: Final = 1 << 28  # bytes of weights; caches hold a part of smaller models
_WARNED_SHARE: Final = 0.9
_SMAPS: Final = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class Area:
    """Memory of this process that asks for huge pages; in bytes."""

    start: int
    end: int
    resident: int
    huge: int  # of `resident`

    @property
    def has_small_pages(self) -> bool:
        """True if at least one huge page is missing. An area that is only partly in use, as slots of experts on disk
        are, has none missing: its other pages stay unallocated."""
        return self.resident - self.huge >= HUGE_PAGE and 10 * self.resident >= 9 * (self.end - self.start)


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
    """Moves this process's weights into huge pages, and logs how many of their bytes are there. Takes some 0.5 ms for
    each page that is moved, at most MOST_SECONDS. A kernel that cannot do it leaves them where they are.

    Only before the process is forked: pages that are shared with a child would be copied."""
    areas = _own_areas()
    if any(area.has_small_pages for area in areas):
        _collapse_all(areas)
        areas = _own_areas()
    _tell(sum(area.resident for area in areas), sum(area.huge for area in areas))


def _tell(resident: int, huge: int) -> None:
    """Logs the bytes of weights, and how many of them are in huge pages."""
    if resident < _LEAST_LOGGED:
        return
    if huge >= _WARNED_SHARE * resident:
        log.info("%.2f of %.2f GiB of weights are in huge pages", huge / GIB, resident / GIB)
        return
    log.warning(
        "only %.2f of %.2f GiB of weights are in huge pages; the others are read about 0.6 times as fast. If free "
        "memory is fragmented, run: echo 1 | sudo tee /proc/sys/vm/compact_memory, then start again; "
        "`moeserve doctor` says whether huge pages are enabled",
        huge / GIB,
        resident / GIB,
    )


def _own_areas() -> list[Area]:
    """Returns an empty list where there is no /proc."""
    try:
        with _SMAPS.open() as lines:
            return areas_of(lines)
    except OSError:
        return []


def _collapse_all(areas: Iterable[Area]) -> None:
    deadline, failures = time.monotonic() + MOST_SECONDS, 0
    for start, size in _pieces(areas):
        if time.monotonic() > deadline:
            return
        if _collapse(start, size):
            failures = 0
            continue
        for page in range(start, start + size, HUGE_PAGE):
            failures = 0 if _collapse(page, HUGE_PAGE) else failures + 1
            if failures >= _MOST_FAILURES:
                return


def _pieces(areas: Iterable[Area]) -> Iterator[tuple[int, int]]:
    """Yields addresses and sizes, both multiples of HUGE_PAGE, of the areas with small pages."""
    for area in areas:
        if not area.has_small_pages:
            continue
        first = -(-area.start // HUGE_PAGE) * HUGE_PAGE
        last = area.end // HUGE_PAGE * HUGE_PAGE
        for start in range(first, last, _PIECE):
            yield start, min(_PIECE, last - start)


def _collapse(start: int, size: int) -> bool:
    """Returns whether all of it is in huge pages now."""
    return bool(_libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _COLLAPSE) == 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

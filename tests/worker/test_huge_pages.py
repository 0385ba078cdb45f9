"""Weights that were written into small pages are moved into huge pages."""

import ctypes
import logging
import mmap
from collections.abc import Iterator

import pytest

from moeserve.config.units import GIB
from moeserve.worker.loading.cpu import huge_pages
from moeserve.worker.loading.cpu.huge_pages import HUGE_PAGE, Area, areas_of, use_huge_pages

HUGEPAGE, NOHUGEPAGE = 14, 15  # linux/mman.h: MADV_*

SMAPS = """\
7fab2a400000-7fab2b000000 rw-p 00000000 00:00 0
Size:              12288 kB
Rss:               12288 kB
AnonHugePages:      6144 kB
VmFlags: rd wr mr mw me ac sd hg
7fab39914000-7fab44000000 r--p 00000000 fe:00 12 /a file: with a colon
Size:             170928 kB
Rss:              170928 kB
AnonHugePages:         0 kB
VmFlags: rd mr mw me sd
7fab50000000-7fab51000000 rw-p 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac sd hg
"""


def test_areas() -> None:
    half, slots = areas_of(SMAPS.splitlines())
    assert half == Area(0x7FAB2A400000, 0x7FAB2B000000, 12 << 20, 6 << 20)
    assert half.has_small_pages
    assert not slots.has_small_pages, "pages of slots that are not in use stay unallocated"


@pytest.fixture
def small_pages() -> Iterator[int]:
    """Address of 10 MiB in small pages, which ask for huge ones only after they were written."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 5 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), NOHUGEPAGE)
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), HUGEPAGE)
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(HUGE_PAGE), 25) != 0:
        pytest.skip("this kernel does not collapse pages, or has no huge page free")
    yield address
    assert memory[:] == bytes(range(256)) * (len(memory) // 256)


def huge_bytes(address: int) -> int:
    with open("/proc/self/smaps") as lines:
        return sum(area.huge for area in areas_of(lines) if area.start <= address < area.end)


def test_pages_are_moved(small_pages: int) -> None:
    before = huge_bytes(small_pages)
    use_huge_pages()
    assert huge_bytes(small_pages) >= max(before, 3 * HUGE_PAGE)


def test_ends_when_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def fail(start: int, size: int) -> bool:
        asked.append(size)
        return False

    monkeypatch.setattr(huge_pages, "_collapse", fail)
    huge_pages._collapse_all([Area(0, 1 << 40, 1 << 40, 0)])
    assert 30 < len(asked) < 40


@pytest.mark.parametrize(("huge", "level"), [(1.0, logging.INFO), (0.8, logging.WARNING)])
def test_log(huge: float, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    huge_pages._tell(GIB, int(huge * GIB))
    assert [record.levelno for record in caplog.records] == [level]
    assert f"{huge:.2f} of 1.00 GiB of weights are in huge pages" in caplog.text

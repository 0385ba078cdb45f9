"""Weights that were written into small pages are moved into huge pages."""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeserve.config.units import GIB
from moeserve.kernels import _C
from moeserve.worker.loading.cpu import huge_pages
from moeserve.worker.loading.cpu.huge_pages import (
    HUGE_PAGE,
    MADV_COLLAPSE,
    Area,
    End,
    _Move,
    areas_of,
    use_huge_pages,
)

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


def test_the_engine_gives_the_same_advice() -> None:
    assert MADV_COLLAPSE == _C.MADV_COLLAPSE


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
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE) != 0:
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


BIG = Area(0, 1 << 34, 1 << 34, 0)
PINNED = Area(1 << 40, (1 << 40) + (1 << 34), 1 << 34, 0)


def answers(monkeypatch: pytest.MonkeyPatch, error_of: Callable[[int, int], int]) -> list[int]:
    """Calls of madvise return these errors; returns the addresses that are asked for."""
    asked = list[int]()

    def collapse(start: int, size: int) -> int:
        asked.append(start)
        return error_of(start, size)

    monkeypatch.setattr(huge_pages, "_collapse", collapse)
    return asked


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EBUSY])
def test_ends_when_there_are_none(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, lambda start, size: error)
    assert _Move([BIG, PINNED]).run() == End.NO_MEMORY
    assert 30 < len(asked) < 40


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EAGAIN])
def test_an_area_that_stays_does_not_end_it(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, lambda start, size: error if start >= PINNED.start else 0)
    assert _Move([PINNED, BIG]).run() == End.REFUSED
    assert 30 < sum(start >= PINNED.start for start in asked) < 40
    assert sum(start < PINNED.start for start in asked) == BIG.end // (64 << 20)


def test_a_page_that_was_never_written_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, lambda start, size: errno.EINVAL if start == 0 else 0)
    _Move([BIG]).run()
    assert max(asked) == BIG.end - (64 << 20)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the mover sees."""
    now = [0.0]
    monkeypatch.setattr(huge_pages, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(("seconds", "ends"), [(0.2, False), (2.0, True)])
def test_the_limit_grows_with_the_weights(
    seconds: float,
    ends: bool,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """seconds: for a GiB of 100; 100 s are the limit."""
    area = Area(0, 100 * GIB, 100 * GIB, 0)
    caplog.set_level(logging.INFO)

    def error_of(start: int, size: int) -> int:
        clock[0] += seconds * size / GIB
        return 0

    answers(monkeypatch, error_of)
    assert _Move([area]).run() == (End.TIME if ends else End.ALL_TRIED)
    assert clock[0] == pytest.approx(100 if ends else 20, abs=1)
    assert caplog.messages[0].startswith("moving 100.0 GiB of weights into huge pages: ")


def test_the_limit_holds_for_single_pages(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(start: int, size: int) -> int:
        clock[0] += 1.0
        return errno.ENOMEM if size > HUGE_PAGE else 0

    asked = answers(monkeypatch, error_of)
    assert _Move([Area(0, GIB, GIB, 0)]).run() == End.TIME
    assert len(asked) < 25


def test_little_is_moved_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answers(monkeypatch, lambda start, size: 0)
    _Move([BIG]).run()
    assert not caplog.messages


def test_names_of_files_in_any_bytes(tmp_path: Path) -> None:
    """A model at a path in Latin-1 ended the start."""
    path = os.path.join(os.fsencode(tmp_path), b"mod\xe8le\r12.gguf")
    with open(path, "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            huge_pages._own_areas()


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize(
    ("huge", "level"), [(1.0, logging.INFO), (0.8, logging.INFO), (0.7, logging.WARNING)]
)
def test_log(huge: float, level: int, end: End, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    huge_pages._tell(GIB, int(huge * GIB), end)
    assert [record.levelno for record in caplog.records] == [level]
    assert f"{huge:.2f} of 1.00 GiB of weights are in huge pages" in caplog.text
    assert (end.value in caplog.text) == (level == logging.WARNING)

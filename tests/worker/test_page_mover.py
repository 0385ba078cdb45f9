"""The worker's threads between KV slots and disk, with a real cache and real files."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import pytest
import torch

from moeserve.kernels.stream_operands import KvLayer
from moeserve.kv.cache_pages import CachePages, kv_tensors
from moeserve.kv.disk.fingerprint import Fingerprint
from moeserve.kv.disk.store import PageStore
from moeserve.messages.pages import PageCopy, PageOrders, PageReport
from moeserve.worker.page_mover import PageMover

SLOTS, PAGE_TOKENS = 64, 4
KEYS = [bytes([number]) * 32 for number in range(8)]


def random_layers() -> list[KvLayer]:
    """Three layers, of which the second does not attend."""
    torch.manual_seed(0)
    shapes = [(SLOTS, 2, 8), (0, 1, 1), (SLOTS, 1, 16)]
    return [KvLayer(torch.randn(shape).half(), torch.randn(shape).half()) for shape in shapes]


@pytest.fixture
def layers() -> list[KvLayer]:
    return random_layers()


def make_mover(folder: Path, layers: list[KvLayer], budget: int = 1 << 20) -> PageMover:
    pages = CachePages(kv_tensors(layers), PAGE_TOKENS)
    fingerprint = Fingerprint(1, "m", "0", "a", "float16", "cpu", PAGE_TOKENS, pages.page_bytes)
    return PageMover(pages, PageStore(folder, budget, [fingerprint]))


def copy(number: int, *slots: int) -> PageCopy:
    return PageCopy(KEYS[number], array("i", slots).tobytes())


def wait_for(mover: PageMover, field: str, count: int) -> bytes:
    """What the mover reports until so many keys are in a field."""
    found = b""
    deadline = time.monotonic() + 10
    while len(found) < 32 * count:
        assert time.monotonic() < deadline
        report = mover.report(may_wait=True)
        found += b"" if report is None else getattr(report, field)
    return found


def test_what_is_written_is_loaded_into_other_slots(tmp_path: Path, layers: list[KvLayer]) -> None:
    mover = make_mover(tmp_path, layers)
    assert mover.page_bytes == PAGE_TOKENS * (2 * 2 * 8 + 2 * 16) * 2
    assert mover.report() == PageReport()
    assert mover.report() is None
    mover.write(PageOrders([copy(0, 5, 9, 7, 60), copy(1, 0, 1, 2, 3)]))
    before = random_layers()
    for layer in layers:  # the copies were made when they were ordered
        layer.keys.zero_()
        layer.values.zero_()
    wait_for(mover, "stored", 2)
    again = make_mover(tmp_path, layers)
    report = again.report()
    assert report is not None
    assert report.stored == KEYS[0] + KEYS[1]
    again.load(PageOrders(loads=[copy(0, 30, 31, 40, 33), copy(1, 3, 2, 1, 0)]))
    wait_for(again, "loaded", 2)
    for layer, old in zip(layers, before, strict=True):
        for now, then in ((layer.keys, old.keys), (layer.values, old.values)):
            if len(now):
                assert torch.equal(now[[30, 31, 40, 33]], then[[5, 9, 7, 60]])
                assert torch.equal(now[[3, 2, 1, 0]], then[[0, 1, 2, 3]])
                assert not now[4:30].any()


def test_a_page_that_is_not_there_fails(tmp_path: Path, layers: list[KvLayer]) -> None:
    mover = make_mover(tmp_path, layers)
    mover.load(PageOrders(loads=[copy(0, 0, 1, 2, 3)]))
    assert wait_for(mover, "failed", 1) == KEYS[0]
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(layers, random_layers(), strict=True))


def test_a_full_disk_refuses_and_goes_on(
    tmp_path: Path, layers: list[KvLayer], caplog: pytest.LogCaptureFixture
) -> None:
    """The device that is always full: a segment cannot be begun there."""
    mover = make_mover(tmp_path, layers)
    (tmp_path / "segment-00000001.kv").symlink_to("/dev/full")
    mover.write(PageOrders([copy(0, 0, 1, 2, 3)]))
    assert wait_for(mover, "refused", 1) == KEYS[0]
    mover.write(PageOrders([copy(1, 0, 1, 2, 3)]))
    assert wait_for(mover, "stored", 1) == KEYS[1]
    assert caplog.text.count("the disk tier cannot write") == 1


def test_pages_that_go_for_others_are_told(tmp_path: Path, layers: list[KvLayer]) -> None:
    mover = make_mover(tmp_path, layers, budget=11_000)
    for number in range(4):
        mover.write(PageOrders([copy(number, 0, 1, 2, 3)]))
    assert wait_for(mover, "gone", 1)[:32] == KEYS[0]

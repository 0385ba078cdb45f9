"""The worker's threads between KV slots, RAM and disk, with a real cache and real files."""

from __future__ import annotations

import threading
import time
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moeserve.kernels.stream_operands import KvLayer
from moeserve.kv import host_blocks
from moeserve.kv.cache_pages import CachePages, kv_tensors
from moeserve.kv.device_pages import DevicePages, Staging
from moeserve.kv.disk.fingerprint import Fingerprint
from moeserve.kv.disk.store import PageStore
from moeserve.kv.host_blocks import CHUNK_BYTES, HostBlocks
from moeserve.kv.ram_store import RamStore
from moeserve.messages.pages import PageCopy, PageOrders, PageReport, StateCopy
from moeserve.worker.tiers.page_mover import PageMover, Tiers
from moeserve.worker.tiers.storage import grow_all_after

SLOTS, PAGE_TOKENS = 64, 4
STATES = torch.arange(6000, dtype=torch.float32).view(6, 1000)  # 8 pages' bytes each, less a part of one
KEYS = [bytes([number]) * 32 for number in range(8)]


def random_layers() -> list[KvLayer]:
    """Three layers, of which the second does not attend."""
    torch.manual_seed(0)
    shapes = [(SLOTS, 2, 8), (0, 1, 1), (SLOTS, 1, 16)]
    return [KvLayer(torch.randn(shape).half(), torch.randn(shape).half()) for shape in shapes]


@pytest.fixture
def layers() -> list[KvLayer]:
    return random_layers()


def make_mover(
    folder: Path | None,
    layers: list[KvLayer],
    budget: int = 1 << 20,
    ram_pages: int = 0,
    *,
    staged: bool = False,
) -> PageMover:
    """staged: as next to a GPU, but for the streams."""
    tensors, state_tensors = kv_tensors(layers), [STATES.clone()]
    pages, states = CachePages(tensors, PAGE_TOKENS), CachePages(state_tensors, 1)
    if staged:
        staging = Staging(torch.device("cpu"), states.page_bytes)
        pages, states = (
            DevicePages(of, each.page_slots, staging)
            for of, each in ((tensors, pages), (state_tensors, states))
        )
    page_bytes = pages.page_bytes
    kinds = [
        Fingerprint(1, "m", "0", "a", "float16", "cpu", *of)
        for of in ((4, page_bytes), (0, states.page_bytes))
    ]
    blocks = HostBlocks(page_bytes, page_bytes * (ram_pages or 20), pinned=False)
    ram = RamStore(blocks) if ram_pages else None
    store = None if folder is None else PageStore(folder, budget, kinds)
    return PageMover(pages, Tiers(blocks, ram, store), 1 << 20, states)


def copy(number: int, *slots: int) -> PageCopy:
    return PageCopy(KEYS[number], array("i", slots).tobytes())


def wait_for(mover: PageMover, field: str, count: int, tier: str = "disk") -> bytes:
    """What the mover reports until so many keys are in a field."""
    found = b""
    deadline = time.monotonic() + 60
    while len(found) < 32 * count:
        assert time.monotonic() < deadline
        report = mover.report(may_wait=True)
        if report is not None:
            found += report.failed if field == "failed" else getattr(getattr(report, tier), field)
    return found


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_written_is_loaded_into_other_slots(
    tmp_path: Path, layers: list[KvLayer], staged: bool
) -> None:
    mover = make_mover(tmp_path, layers, staged=staged)
    assert mover.page_bytes == PAGE_TOKENS * (2 * 2 * 8 + 2 * 16) * 2
    assert mover.report() == PageReport()
    assert mover.report() is None
    mover.write(PageOrders([copy(0, 5, 9, 7, 60), copy(1, 0, 1, 2, 3)]))
    before = random_layers()
    for layer in layers:  # the copies were made when they were ordered
        layer.keys.zero_()
        layer.values.zero_()
    wait_for(mover, "stored", 2)
    again = make_mover(tmp_path, layers, staged=staged)
    report = again.report()
    assert report is not None
    assert report.disk.stored == KEYS[0] + KEYS[1]
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


@pytest.mark.parametrize("staged", [False, True])
def test_ram_and_disk_behind_it(tmp_path: Path, layers: list[KvLayer], staged: bool) -> None:
    """Pages and a state go to RAM, from there to disk, and come back from where they are."""
    mover = make_mover(tmp_path, layers, ram_pages=10, staged=staged)
    mover.write(PageOrders([copy(0, 5, 9, 7, 60), copy(1, 0, 1, 2, 3)], state_writes=[StateCopy(KEYS[2], 4)]))
    wait_for(mover, "stored", 3, "ram")
    before = random_layers()
    for layer in layers:
        layer.keys.zero_()
        layer.values.zero_()
    mover.write(PageOrders(to_disk=[KEYS[1], KEYS[2]]))
    assert wait_for(mover, "stored", 2) == KEYS[1] + KEYS[2]
    mover.write(PageOrders(to_disk=[KEYS[7]]))
    assert wait_for(mover, "skipped", 1) == KEYS[7]
    mover.load(
        PageOrders(loads=[copy(0, 30, 31, 40, 33), copy(1, 3, 2, 1, 0)], state_loads=[StateCopy(KEYS[2], 0)])
    )
    wait_for(mover, "loaded", 3, "ram")
    again = make_mover(tmp_path, layers, ram_pages=10, staged=staged)
    again.load(PageOrders(loads=[copy(1, 50, 51, 52, 53)], state_loads=[StateCopy(KEYS[2], 1)]))
    wait_for(again, "loaded", 2)
    for layer, old in zip(layers, before, strict=True):
        for now, then in ((layer.keys, old.keys), (layer.values, old.values)):
            if len(now):
                assert torch.equal(now[[30, 31, 40, 33]], then[[5, 9, 7, 60]])
                assert torch.equal(now[[3, 2, 1, 0]], then[[0, 1, 2, 3]])
                assert torch.equal(now[50:54], then[0:4])
    states = [each._states._rows[0].view(torch.float32) for each in (mover, again)]  # type: ignore[union-attr]
    assert torch.equal(states[0][0], STATES[4])
    assert torch.equal(states[1][1], STATES[4])


def test_ram_gives_up_what_was_not_used_for_longest(layers: list[KvLayer]) -> None:
    mover = make_mover(None, layers, ram_pages=3)
    mover.write(PageOrders([copy(number, 0, 1, 2, 3) for number in range(3)], used=KEYS[1] + KEYS[0]))
    wait_for(mover, "stored", 3, "ram")
    mover.write(PageOrders(used=KEYS[1] + KEYS[0]))
    mover.write(PageOrders([copy(number, 4, 5, 6, 7) for number in (3, 4)]))
    assert wait_for(mover, "gone", 2, "ram") == KEYS[2] + KEYS[1]
    wait_for(mover, "stored", 2, "ram")
    mover.load(PageOrders(loads=[copy(1, 8, 9, 10, 11)]))
    assert wait_for(mover, "failed", 1) == KEYS[1]
    mover.write(PageOrders(state_writes=[StateCopy(KEYS[5], 0)]))
    assert wait_for(mover, "skipped", 1, "ram") == KEYS[5], "a state is larger than all of it"


def test_memory_may_be_taken_ahead() -> None:
    blocks = HostBlocks(CHUNK_BYTES // 2, 5 * CHUNK_BYTES // 2, pinned=False)
    blocks.grow_all()
    assert not blocks.grow(), "there are all"
    assert blocks.take(5 * CHUNK_BYTES // 2) is not None
    assert blocks.take(1) is None


def test_a_chunk_has_its_memory_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []

    def pin(chunk: torch.Tensor) -> int:
        pinned.append(bool(chunk.all()))  # it has been written to
        return chunk.data_ptr()

    monkeypatch.setattr(host_blocks, "pin", pin)
    monkeypatch.setattr(host_blocks, "unpin", lambda addresses: None)
    blocks = HostBlocks(CHUNK_BYTES // 2, 2 * CHUNK_BYTES, pinned=True)
    blocks.grow()
    assert blocks.take(2 * CHUNK_BYTES) is not None
    assert pinned == [True, True]


def test_between_two_chunks_that_are_pinned_a_gpu_gets_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = HostBlocks(CHUNK_BYTES // 2, 5 * CHUNK_BYTES // 2, pinned=False)
    blocks.is_pinned = True  # which takes a GPU's driver
    calls: list[tuple[float, float]] = []

    def grow() -> bool:
        began = time.perf_counter()
        time.sleep(0.02)
        calls.append((began, time.perf_counter()))
        return len(calls) < 4

    monkeypatch.setattr(blocks, "grow", grow)
    blocks.grow_all()
    assert len(calls) == 4
    assert all(after[0] - before[1] >= 2 * 0.02 for before, after in pairwise(calls))


def test_memory_is_taken_later_where_answers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is needed before."""
    later: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: later.append(timer))
    blocks = HostBlocks(CHUNK_BYTES // 2, 5 * CHUNK_BYTES // 2, pinned=False)
    grow_all_after(blocks, 1.0)
    assert blocks.take(1) is not None
    assert len(blocks._chunks) == 1
    (timer,) = later
    assert timer.interval == 1.0
    timer.function()
    assert not blocks.grow(), "there are all"


def test_what_a_load_reads_stays_in_ram(layers: list[KvLayer]) -> None:
    blocks = HostBlocks(100, 300, pinned=False)
    ram = RamStore(blocks)
    for key in KEYS[:3]:
        assert ram.reserve(key, 100)[0] is not None
        assert ram.get(key) is None, "its bytes are not there yet"
        ram.commit(key)
    assert ram.get(KEYS[0]) is not None
    assert ram.reserve(KEYS[3], 200)[1] == KEYS[1:3]
    assert ram.reserve(KEYS[4], 100) == (None, []), "all that is left is in use"
    ram.release(KEYS[0])
    assert ram.reserve(KEYS[4], 100)[1] == KEYS[:1]
    assert ram.keys() == []


def test_another_router_is_told_all_again(tmp_path: Path, layers: list[KvLayer]) -> None:
    mover = make_mover(tmp_path, layers, ram_pages=3)
    mover.write(PageOrders([copy(0, 0, 1, 2, 3)]))
    wait_for(mover, "stored", 1, "ram")
    mover.write(PageOrders(to_disk=[KEYS[0]]))
    mover.start_again()
    report = mover.report()
    assert report is not None
    assert (report.ram.stored, report.disk.stored) == (KEYS[0], KEYS[0])


class BehindSteps(CachePages):
    """As next to a GPU whose steps are still to run."""

    wait_s = 0.0

    def reach(self, mark: object) -> None:
        time.sleep(self.wait_s)


def test_steps_before_a_load_are_not_the_time_of_ram(layers: list[KvLayer]) -> None:
    """Which would be taken for slower than computing the same, behind the same steps."""
    tensors = kv_tensors(layers)
    pages = BehindSteps(tensors, PAGE_TOKENS)
    blocks = HostBlocks(pages.page_bytes, pages.page_bytes * 4, pinned=False)
    mover = PageMover(pages, Tiers(blocks, RamStore(blocks), None), 1 << 20)
    mover.write(PageOrders([copy(0, 5, 9, 7, 60)]))
    wait_for(mover, "stored", 1, "ram")
    pages.wait_s = 2.0
    mover.load(PageOrders(loads=[copy(0, 3, 2, 1, 0)]))
    loaded, load_ms, deadline = b"", 0.0, time.monotonic() + 60
    while not loaded:
        assert time.monotonic() < deadline
        if (report := mover.report(may_wait=True)) is not None:
            loaded += report.ram.loaded
            load_ms += report.ram.load_ms
    assert load_ms < 1000.0, "a copy of a page, of which the wait takes 2 s"

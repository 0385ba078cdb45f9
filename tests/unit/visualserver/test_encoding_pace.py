"""The pace of encoding beside running requests, in virtual time on a device that both share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moeserve.processes.tower_page import TowerPage
from moeserve.visualserver.encoding_pace import EncodingPace
from moeserve.visualserver.slices import LOOK_S, Slices

SHARE = 0.1


class World:
    """A device on which slices of the tower take `slice_s` seconds."""

    def __init__(self, folder: Path, slice_s: float, *, is_gpu: bool = True) -> None:
        self.now = self.taken = self.behind = 0.0
        self.rests: list[float] = []
        self.waits: list[int] = []
        self.loads: list[tuple[float, float]] = []
        self.slice_s = slice_s
        self.stops_steps = is_gpu
        self.page = TowerPage(folder / "tower-page")
        self.router = TowerPage(folder / "tower-page")
        self.at_sleep: Callable[[], None] = lambda: None
        self.slices = Slices(EncodingPace(SHARE), self.page, self, lambda: self.now, self.sleep)

    def wait(self, behind: int) -> None:
        self.waits.append(behind)

    def used_s(self) -> float:
        return self.now if self.stops_steps else self.taken

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rests.append(seconds)
        self.at_sleep()

    def encode(self, slices: int, *, cpu: float = 1.0) -> float:
        """Encodes a picture. cpu: part of the cores that the operating system gives to a slice. Returns seconds."""
        began = self.now
        with self.slices.picture():
            for at in range(slices):
                self.now += self.slice_s / cpu
                self.taken += self.slice_s
                if at + 1 < slices:
                    self.slices.ended((at + 1) / slices)
                    self.loads.append(self.router.encoding)
        return self.now - began


def test_a_picture_alone_does_not_rest(tmp_path: Path) -> None:
    """The next slice is launched before the one before it has ended."""
    world = World(tmp_path, 0.007)
    assert world.encode(54) == pytest.approx(54 * 0.007)
    assert (world.rests, set(world.waits), set(world.loads)) == ([], {1}, {(0.0, 0.0)})


@pytest.mark.parametrize("is_gpu", [True, False])
@pytest.mark.parametrize("slices", [1, 2, 54])
def test_running_requests_keep_nine_tenths(tmp_path: Path, slices: int, is_gpu: bool) -> None:
    """Pictures come without a pause; at each moment the tower has had a tenth of the time, and one slice more."""
    world = World(tmp_path, 0.004, is_gpu=is_gpu)
    world.router.open_requests = 3
    began = world.now
    for _ in range(20):
        world.encode(slices)
        assert world.taken <= SHARE * (world.now - began) + world.slice_s
    assert world.now == pytest.approx(world.taken / SHARE, rel=0.05), "and no longer rests than that"
    assert 1 not in world.waits


def test_the_router_knows_what_the_tower_takes(tmp_path: Path) -> None:
    world = World(tmp_path, 0.004)
    world.router.open_requests = 1
    world.encode(5)
    assert [share for _, share in world.loads] == [SHARE] * 4
    assert [ms for ms, _ in world.loads] == pytest.approx([4.0] * 4)
    assert world.router.encoding == (0.0, 0.0)
    on_cpu = World(tmp_path, 0.4, is_gpu=False)  # its threads have a lower priority than a step's
    on_cpu.encode(5, cpu=0.1)
    assert on_cpu.loads == [(0.0, SHARE)] * 4
    assert not on_cpu.rests, "the operating system gave it no more than its share"


def test_an_encoding_that_fails_leaves_no_load(tmp_path: Path) -> None:
    world = World(tmp_path, 0.004)
    world.router.open_requests = 1

    def fail() -> None:
        if world.router.encoding != (0.0, 0.0):
            raise MemoryError

    world.at_sleep = fail
    with pytest.raises(MemoryError):
        world.encode(2)
    assert world.router.encoding == (0.0, 0.0)


def test_a_rest_ends_with_the_last_answer(tmp_path: Path) -> None:
    world = World(tmp_path, 0.1)
    world.router.open_requests = 1

    def end_answers() -> None:
        if world.now > 0.5:
            world.router.open_requests = 0

    world.at_sleep = end_answers
    assert world.encode(10) == pytest.approx(0.5 + 9 * 0.1, abs=2 * LOOK_S)


@pytest.mark.parametrize(("slice_s", "most"), [(0.1, 54.0), (0.5, 61.0), (2.0, 120.0)])
def test_a_picture_does_not_wait_without_end(tmp_path: Path, slice_s: float, most: float) -> None:
    """54 slices: 5.4 s alone take ten times as long, 27 s a minute, 108 s no longer than alone."""
    world = World(tmp_path, slice_s)
    world.router.open_requests = 1
    assert world.encode(54) <= most
    if slice_s == 0.5:
        assert world.loads[-1][1] == pytest.approx(27 / 60, rel=0.1), "the router knows of the larger share"


def test_a_page_is_found_by_a_successor(tmp_path: Path) -> None:
    TowerPage(tmp_path / "page").open_requests = 7
    page = TowerPage(tmp_path / "page")
    assert (page.open_requests, page.encoding) == (7, (0.0, 0.0))
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600

"""The real scheduler, engine, threads and files, with a disk that hangs, is slow, or goes away."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path

import pytest

from moeserve.kv.disk.segment import Segment
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner, load_cpu_model
from moeserve.worker.tiers import tier_log
from tests.gpu.driver import small_config
from tests.support.worker.real_time_world import RealTimeWorld

PROMPT_TOKENS = 167  # 5 whole pages; with its last token in none
NUM_PROMPTS = 12
read_page = Segment.read


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    folder = tmp_path_factory.mktemp("disk") / "tier"
    config = small_config(tiny_model, device="cpu", threads=2, max_num_seqs=4, kv_disk=str(folder))
    return load_cpu_model(config, lambda *_: None)


class ToldClock:
    """In the place of `time`, for several threads."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds

    def perf_counter(self) -> float:
        return self._now


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def expected(model: CpuModel) -> dict[int, list[int]]:
    """The answers, whose prompts are on disk then."""
    world = RealTimeWorld(build_cpu_runner(model))
    for id in range(NUM_PROMPTS):
        world.ask(id, prompt(id))
    world.finish()
    assert world.scheduler.load_report().disk.pages >= 5 * NUM_PROMPTS
    return {id: seen.tokens for id, seen in world.seen.items()}


def test_a_disk_that_hangs_holds_up_nobody(
    model: CpuModel, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that runs goes on to its end; the prompt that waits for pages is computed in the end."""
    gate = threading.Event()
    monkeypatch.setattr(Segment, "read", lambda *args: gate.wait(60) and read_page(*args))
    world = RealTimeWorld(build_cpu_runner(model))
    world.ask(100, prompt(100)[:20], max_tokens=60)
    while not world.seen[100].tokens:
        world.turn()
    world.ask(0, prompt(0))
    while world.seen[100].final is None:
        world.turn()
    assert len(world.seen[100].tokens) == 60
    while world.seen[0].final is None:
        world.turn()
    assert world.seen[0].tokens == expected[0]
    assert not gate.is_set()
    assert world.scheduler.load_report().disk.tokens == 0
    gate.set()
    world.finish()
    world.check_all_free()


def test_a_slow_disk_is_left_alone_within_ten_decisions(
    model: CpuModel, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of a second a page, beside steps of 5 ms. Both are told: a busy machine's own steps may be as slow."""
    clock = ToldClock()

    def read_slowly(*args: object) -> bool:
        clock.add(0.2)
        return read_page(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tier_log, "time", clock)
    monkeypatch.setattr(Segment, "read", read_slowly)
    world = RealTimeWorld(build_cpu_runner(model), lambda _: 5.0)
    read: list[int] = []
    for id in range(NUM_PROMPTS):
        world.ask(id, prompt(id))
        world.finish()
        read.append(world.scheduler.load_report().disk.bytes_read)
    assert {id: seen.tokens for id, seen in world.seen.items()} == expected
    assert read[0] > 0
    assert read[9] == read[-1], "nothing is read any more"
    assert world.scheduler.load_report().disk.declined > 0
    world.check_all_free()


def test_a_folder_that_goes_away(
    model: CpuModel, expected: dict[int, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """What is open is still read, what is new cannot be written, and every answer is what it was."""
    assert model.tiers is not None
    assert model.tiers.directory is not None
    folder = model.tiers.directory.path
    world = RealTimeWorld(build_cpu_runner(model))
    shutil.rmtree(folder)
    for id in range(4):
        world.ask(id, prompt(id))
        world.ask(100 + id, prompt(100 + id))
    world.finish()
    assert {id: world.seen[id].tokens for id in range(4)} == {id: expected[id] for id in range(4)}
    assert caplog.text.count("the disk tier cannot write") == 1
    world.check_all_free()

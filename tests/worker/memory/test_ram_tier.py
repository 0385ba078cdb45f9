"""The real scheduler, engine and threads with the tier in RAM, as next to a GPU but for its streams."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moeserve.errors import ConfigError
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.models.open import open_model
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner, load_cpu_model, load_cpu_runner
from moeserve.worker.tiers.page_mover import PageMover
from moeserve.worker.tiers.storage import (
    PAGE_TOKENS,
    PageTiersPlan,
    claim_directory,
    plan_tiers,
    ram_tier_bytes,
)
from tests.gpu.driver import small_config
from tests.support.worker.real_time_world import RealTimeWorld

TURNS, CONVERSATIONS = 3, 3
POOL = 300  # tokens, of which a conversation ends with 252


class StagedPlan(PageTiersPlan):
    def open(
        self,
        layers: Sequence[KvLayer],
        states: Sequence[StateLayer],
        device: torch.device | None = None,
        *,
        pin_after_s: float = 0.0,
    ) -> PageMover:
        return super().open(layers, states, torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    """With a tier in RAM, and one on disk."""
    folder = tmp_path_factory.mktemp("disk") / "tier"
    config = small_config(tiny_model, device="cpu", threads=2, max_num_seqs=4, kv_disk=str(folder))
    loaded = load_cpu_model(config, lambda *_: None)
    assert loaded.tiers is not None
    fields = {field.name: getattr(loaded.tiers, field.name) for field in dataclasses.fields(loaded.tiers)}
    return dataclasses.replace(loaded, tiers=StagedPlan(**fields | {"ram_bytes": 64 << 20}))


def converse(world: RealTimeWorld) -> dict[int, list[int]]:
    """Conversations in turn, of which the pool holds one at a time. The answers, by turn and conversation."""
    rng = random.Random(0)
    histories = [[rng.randrange(300, 4000) for _ in range(140)] for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for number, history in enumerate(histories):
            world.ask(10 * turn + number, history)
            world.finish()
            history += world.seen[10 * turn + number].tokens
            history += [rng.randrange(300, 4000) for _ in range(50)]
    return {id: seen.tokens for id, seen in world.seen.items()}


def test_conversations_that_the_pool_has_given_up_come_from_ram(model: CpuModel) -> None:
    without = RealTimeWorld(build_cpu_runner(dataclasses.replace(model, tiers=None)))
    expected = converse(without)
    # Steps are told as long, so that a busy machine's reading is not slower.
    runner = build_cpu_runner(model)
    world = RealTimeWorld(runner, lambda _: 1000.0, num_kv_slots=POOL)
    assert converse(world) == expected
    report = world.scheduler.load_report()
    in_pages = sum((140 + 3 + 54 * turn) // PAGE_TOKENS * PAGE_TOKENS for turn in range(TURNS - 1))
    assert report.ram.tokens >= 0.9 * in_pages * CONVERSATIONS
    assert report.ram.bytes_written == runner.ready().kv_page_bytes * report.ram.pages
    assert report.disk.pages == report.ram.pages, "what is in RAM goes to disk"
    assert report.disk.tokens == 0
    world.check_all_free()


def test_its_size(tiny_model: Path) -> None:
    gib = 1 << 30

    def chosen(pool: int, free: int, **options: object) -> int:
        return ram_tier_bytes(small_config(tiny_model, **options), pool * gib, free * gib)

    assert chosen(10, 60) == 15 * gib
    assert chosen(10, 600) == 40 * gib
    assert chosen(20, 60) == 0
    assert ram_tier_bytes(small_config(tiny_model), 10 * gib, 60 * gib, has_window_pool=True) == 0
    assert chosen(40, 60, kv_ram=50.0) == 50 * gib
    assert chosen(10, 60, kv_ram=0.0) == 0
    assert chosen(10, 60, prefix_cache="off") == 0
    with pytest.raises(ConfigError, match=r"--kv-ram 70: 60\.0 GiB of RAM are free"):
        chosen(10, 60, kv_ram=70.0)
    with pytest.raises(ConfigError, match="--kv-ram: is a part of the prefix cache"):
        claim_directory(small_config(tiny_model, kv_ram=1.0, prefix_cache="off"))
    with pytest.raises(ConfigError, match="KV pool is in RAM already"):
        load_cpu_runner(small_config(tiny_model, device="cpu", kv_ram=1.0), lambda *_: None)
    assert plan_tiers(small_config(tiny_model), None, 0, open_model(tiny_model), None, "gpu") is None  # type: ignore[arg-type]

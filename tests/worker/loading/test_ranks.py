"""What the ranks of several GPUs have each: cores, and counts of experts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.ranks import RankExperts
from moeserve.models.interface import ModelShape
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.placement.group import refuse_placement_flags, share_among
from moeserve.worker.group import shares
from moeserve.worker.group.expert_use import together
from moeserve.worker.loading.gpu.rank_cores import cores_of_rank
from tests.conftest import TINY_MODEL


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two NUMA nodes of four cores, of two threads each: core i is CPUs i and i + 8."""
    for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return tmp_path


def test_each_gpu_has_the_cores_of_its_memory_node(machine: Path) -> None:
    assert cores_of_rank(0, [1, 0], machine) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert cores_of_rank(1, [1, 0], machine) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_gpus_at_one_node_share_its_cores(machine: Path) -> None:
    parts = [cores_of_rank(rank, [0, 0, 1], machine) for rank in range(3)]
    assert parts == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


@pytest.mark.parametrize("nodes", [[None, None], [0, None], [0, 7]])
def test_cores_are_divided_evenly_where_a_node_is_not_known(machine: Path, nodes: list[int | None]) -> None:
    parts = [cores_of_rank(rank, nodes, machine) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(16))
    assert len(parts[0]) == 8


def test_fewer_cores_than_gpus_are_all_of_each(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 8})
    assert [cores_of_rank(rank, [None] * 3, machine) for rank in range(3)] == [[0, 8]] * 3


def rank_counts(first: int, tokens: list[list[int]], on_gpu: list[list[int]]) -> RankExperts:
    t, g = np.array(tokens, np.int64), np.array(on_gpu, np.uint8)
    layers, experts = t.shape
    return RankExperts(first, layers, experts, t.tobytes(), g.tobytes(), None)


def test_counts_of_stages_stand_one_behind_the_other() -> None:
    ranks = [rank_counts(0, [[1, 2]], [[1, 0]]), rank_counts(1, [[3, 4], [5, 6]], [[1, 1], [0, 1]])]
    use = together(ranks, 2, 1)
    assert (use.layers, use.experts) == (3, 2)
    assert np.frombuffer(use.tokens, np.int64).tolist() == [1, 2, 3, 4, 5, 6]
    assert list(use.on_gpu) == [1, 0, 2, 2, 0, 2]


def test_counts_of_divided_layers_are_one_ranks_and_places_all_ranks() -> None:
    ranks = [rank_counts(0, [[7, 8]], [[1, 0]]), rank_counts(0, [[7, 8]], [[0, 1]])]
    use = together(ranks, 2, 1)
    assert np.frombuffer(use.tokens, np.int64).tolist() == [7, 8]
    assert list(use.on_gpu) == [1, 2]


@pytest.fixture
def shape() -> ModelShape:
    return read_shape(open_model(TINY_MODEL))


def sandwiched(shape: ModelShape) -> ModelShape:
    return replace(shape, layers=tuple(replace(layer, is_sandwiched=True) for layer in shape.layers))


def test_how_a_model_is_divided_by_itself(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallel; by layers where it cannot be, or where its sums would go through the host."""
    config = ServerConfig(gpus="2")
    reach = True
    monkeypatch.setattr(shares, "_reach_one_another", lambda _: reach)
    assert shares.with_parallel(config, shape, [0, 1]).parallel == "tensor"
    assert shares.with_parallel(config, sandwiched(shape), [0, 1]).parallel == "layers"
    assert shares.with_parallel(config, shape, list(range(9))).parallel == "layers"  # of 8 experts
    reach = False
    assert shares.with_parallel(config, shape, [0, 1]).parallel == "layers"
    asked = replace(config, parallel="tensor")
    assert shares.with_parallel(asked, shape, [0, 1]).parallel == "tensor"


@pytest.mark.parametrize(
    ("gpus", "parallel", "remedy"),
    [
        (4, "layers", "3 layers, 3 of which attend, for 4 GPUs; choose fewer GPUs, or --parallel tensor"),
        (9, "tensor", "8 experts in layer 0 for 9 GPUs; choose fewer GPUs, or --parallel layers"),
        (9, "layers", "3 layers, 3 of which attend, for 9 GPUs; choose fewer GPUs"),
    ],
)
def test_who_asks_for_too_many_gpus_is_told_what_would_do(gpus: int, parallel: str, remedy: str) -> None:
    source = open_model(TINY_MODEL)
    config = ServerConfig(gpus=str(gpus), parallel=parallel)
    with pytest.raises(ConfigError, match=f"^--gpus {gpus}: {remedy}$"):
        share_among(config, read_shape(source), source.tensors, 0, gpus, None)


@pytest.mark.parametrize(
    ("parallel", "flags", "named"),
    [
        ("layers", {"n_gpu_layers": 3}, "--n-gpu-layers"),
        ("tensor", {"placement_rules": "rules.yaml"}, "--placement-rules"),
        ("tensor", {"gpu_prefill_token_threshold": 5}, "--gpu-prefill-token-threshold"),
        ("layers", {"debug_dump": "folder"}, "--debug-dump"),
        ("tensor", {"unpacked_experts": 1.0}, "--unpacked-experts"),
        ("layers", {"unpacked_experts": 1.0}, "--unpacked-experts"),
    ],
)
def test_flags_without_a_meaning_are_refused(parallel: str, flags: dict[str, object], named: str) -> None:
    config = replace(ServerConfig(gpus="2", parallel=parallel), **flags)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=named):
        refuse_placement_flags(config)
    refuse_placement_flags(ServerConfig(gpus="2", parallel=parallel, num_gpu_experts=1, unpacked_experts=0.0))

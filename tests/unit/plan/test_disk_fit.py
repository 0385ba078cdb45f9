"""`moeserve plan` of a model whose experts do not fit in RAM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.cli.plan import disk_rate
from moeserve.cli.plan.disk_rate import measure_disk
from moeserve.kv.layout import KvLayout
from moeserve.models.interface import ModelShape
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.expert_cache.replay import Steps
from moeserve.placement.expert_cache.replay_disk import replay_disk
from moeserve.placement.expert_cache.routing_trace import RoutingTrace, write_trace
from moeserve.placement.expert_ram import READER_BYTES, dense_bytes, expert_bytes
from moeserve.placement.sizes import ModelSizes
from tests.support.router.plan_command import fails, run

TOKENS = 200


def flags_of(model: Path, *, share: float) -> tuple[str, ...]:
    """share: of the experts that fit in RAM."""
    file = open_gguf(model)
    budget = share * expert_bytes(ModelSizes.of(file.tensors, KvLayout(read_shape(file)))) / (1 << 30)
    ram = ("--ram", "4", "--device", "cpu", "--expert-ram", f"{budget:.6f}", "--disk-bandwidth", "0.1")
    return ("--model", str(model), *ram)


def trace_file(path: Path, shape: ModelShape, first_experts: list[int]) -> str:
    """A trace whose token i uses, in every layer, as many experts as a token does from first_experts[i] on."""
    experts = shape.num_experts
    ids = [[(first + rank) % experts for rank in range(shape.top_k)] for first in first_experts]
    all_layers = np.repeat(np.array(ids, np.uint16)[:, None], shape.num_layers, axis=1)
    write_trace(path, RoutingTrace("a test", experts, all_layers))
    return str(path)


@pytest.mark.usefixtures("no_measuring")
def test_what_ram_holds_and_a_token_reads(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    file = open_gguf(tiny_model)
    sizes = ModelSizes.of(file.tensors, KvLayout(read_shape(file)))
    shown = run(capsys, *flags_of(tiny_model, share=0.7))
    experts = shown["memory"]["ram_weights"] - dense_bytes(sizes) - READER_BYTES
    assert 0.6 < experts / expert_bytes(sizes) <= 0.7
    assert any("at 0.1 GB/s (--disk-bandwidth)" in caution for caution in shown["cautions"])
    assert any("record one with --record-routing-trace" in caution for caution in shown["cautions"])


@pytest.mark.usefixtures("no_measuring")
def test_a_recorded_trace_tells_the_hits_and_the_speed(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    shape = read_shape(open_gguf(tiny_model))
    same = trace_file(tmp_path / "same", shape, [0] * TOKENS)
    # A text that never uses an expert again before all others.
    other = trace_file(tmp_path / "other", shape, [shape.top_k * i for i in range(TOKENS)])
    in_ram = run(capsys, "--model", str(tiny_model), "--ram", "4", "--device", "cpu")["speed"]

    def planned(trace: str) -> dict[str, Any]:
        shown = run(capsys, *flags_of(tiny_model, share=0.5), "--routing-trace", trace)
        assert not any("--record-routing-trace" in caution for caution in shown["cautions"])
        speed: dict[str, Any] = shown["speed"]
        return speed

    local, scattered = planned(same), planned(other)
    assert local["hit_rates"]["1"] == 1.0
    assert local["decode"]["1"] == pytest.approx(in_ram["decode"]["1"])
    assert local["decode_at_first"]["1"] < local["decode"]["1"]
    assert scattered["hit_rates"]["1"] < 0.2
    used = shape.top_k * sum(layer.expert.cpu for layer in _sizes(tiny_model).layers)
    read_s = (1 - scattered["hit_rates"]["1"]) * used / 0.1e9
    assert 1 / scattered["decode"]["1"] == pytest.approx(1 / in_ram["decode"]["1"] + read_s, rel=1e-6)
    assert local["prefill"] == scattered["prefill"]
    assert local["prefill"]["512"] < in_ram["prefill"]["512"]


@pytest.mark.usefixtures("no_measuring")
def test_beneath_a_gpu_ram_holds_a_share_of_its_misses(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    shape = read_shape(open_gguf(tiny_model))
    scattered = trace_file(tmp_path / "other", shape, [shape.top_k * i for i in range(TOKENS)])
    machine = ("--model", str(tiny_model), "--ram", "8", "--gpu-memory", "4", "--num-gpu-experts", "2")
    rates = [
        "--gpu-bandwidth",
        "1000",
        "--gpu-tflops",
        "100",
        "--pcie-bandwidth",
        "20",
        "--disk-bandwidth",
        "0.1",
    ]
    whole = sum(layer.num_experts * layer.expert.cpu for layer in _sizes(tiny_model).layers)
    half = ("--expert-ram", f"{whole / 2 / (1 << 30):.6f}")
    in_ram = run(capsys, *machine, *rates, "--routing-trace", scattered)
    shown = run(capsys, *machine, *rates, "--routing-trace", scattered, *half)
    slots = shown["memory"]["ram_weights"] - READER_BYTES
    assert slots < in_ram["memory"]["ram_weights"] - whole / 4
    assert shown["speed"]["hit_rates"] == in_ram["speed"]["hit_rates"]
    assert shown["speed"]["decode"]["1"] < 0.5 * in_ram["speed"]["decode"]["1"]
    assert any("of the experts that the GPU misses RAM holds" in caution for caution in shown["cautions"])
    told = fails(capsys, *machine, "--expert-ram", "0.001", "--device", "cuda", "--n-gpu-layers", "1")
    assert "--expert-ram: where the CPU computes the first layers" in told


def _sizes(model: Path) -> ModelSizes:
    file = open_gguf(model)
    return ModelSizes.of(file.tensors, KvLayout(read_shape(file)))


@pytest.mark.usefixtures("no_measuring")
def test_a_trace_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    write_trace(trace, RoutingTrace("a test", 4, np.zeros((TOKENS, 1, 1), np.uint16)))
    told = fails(capsys, *flags_of(tiny_model, share=0.5), "--routing-trace", str(trace))
    assert "it records 1 layers of 4 experts, 1 per token; the model has" in told


def misses(ids: list[list[int]], slots: int, experts: int = 8, **options: Any) -> list[int]:
    trace = RoutingTrace("a test", experts, np.array(ids, np.uint16)[:, None])
    return [int(use.missed[0]) for use in replay_disk(Steps(trace, 1), [slots], experts, **options)]


def test_the_expert_with_the_lowest_score_goes() -> None:
    # 0 was used twice and lately, so that 2 takes 1's slot, and 1 that of 2.
    assert misses([[0], [1], [0], [2], [0], [1], [0]], slots=2) == [1, 1, 0, 1, 0, 1, 0]


def test_pinned_experts_stay() -> None:
    pinned = np.zeros((1, 8), np.bool_)
    pinned[0, 5] = True
    assert misses([[5], [0], [1], [0], [5]], slots=2, pinned=pinned) == [0, 1, 1, 1, 0]


def test_of_more_experts_than_slots_the_last_stay() -> None:
    assert misses([[0, 1, 2, 3], [2, 3, 0, 1], [2, 3, 4, 5]], slots=2) == [4, 2, 2]


def test_a_disk_is_measured_at_random_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_rate, "SECONDS", 0.0)
    path = tmp_path / "model"
    path.write_bytes(b"x" * (1 << 20))
    assert measure_disk(path) is None
    os.truncate(path, 65 << 20)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        assert measure_disk(path) is None
        return
    found = measure_disk(path)
    assert found is not None
    assert found.bytes_per_s > 1e6
    assert found.origin == "measured"

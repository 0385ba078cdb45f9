"""`moeserve plan` beside the engines: rates measured here, and what the GPU engine will take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.cli.command_line import read_options, resolve
from moeserve.cli.main import main
from moeserve.cli.plan.gpu_machine import measure_gpu
from moeserve.cli.plan.options import SHARED, command_parser
from moeserve.kernels.experts.op import method_for
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.worker.adapters.cpu import cpu_adapters
from moeserve.worker.adapters.memory import open_adapters
from moeserve.worker.loading.cpu import load as cpu_loading
from moeserve.worker.loading.cpu.load import load_cpu_model
from tests.conftest import OWN_FIXTURES, TINY_MODEL
from tests.support.models.peft_files import GATE, SHAPE, pair, write


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_measured_here(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    shown = run(capsys, "--model", str(tiny_model), "--threads", str(len(os.sched_getaffinity(0))))
    cpu = shown["rates"]["cpu"]
    assert 1e8 < cpu["read"] < 1e13
    assert 1e8 < cpu["expert_ops"] < 1e15
    assert 0 < cpu["op_s"] < 1e-2
    assert all(rate > 0 for rate in shown["speed"]["decode"].values())
    given = run(capsys, "--model", str(tiny_model), "--cpu-bandwidth", "7", "--cpu-gops", "8")
    assert (given["rates"]["cpu"]["read"], given["rates"]["cpu"]["dense_ops"]) == (7e9, 8e9)


@pytest.mark.parametrize("unpacked", ["0.1", "auto"])
def test_flags_of_a_gpu_do_not_reach_the_measured_cpu(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, unpacked: str
) -> None:
    shown = run(capsys, "--model", str(tiny_model), "--gpu-memory", "4", "--unpacked-experts", unpacked)
    assert shown["rates"]["cpu"]["read"] > 0
    assert shown["memory"]["gpu_unpacked"] > 0


def test_experts_are_kept_unpacked_unless_none_are_wanted(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    flags = ["--model", str(tiny_model), "--gpu-memory", "4"]
    assert run(capsys, *flags)["memory"]["gpu_unpacked"] > 0
    assert run(capsys, *flags, "--unpacked-experts", "0")["memory"]["gpu_unpacked"] == 0


@pytest.mark.parametrize("name", ["kimik3", "nemotronhlatent"])
def test_experts_narrower_than_the_model_are_measured(capsys: pytest.CaptureFixture[str], name: str) -> None:
    shown = run(capsys, "--model", str(OWN_FIXTURES / f"tiny-{name}-f16.gguf"), "--device", "cpu")
    assert 1e6 < shown["rates"]["cpu"]["expert_ops"] < 1e15


def test_what_is_planned_for_adapters_is_what_they_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their matrices, a step's workspace, and the KV pool that is left."""
    experts = pair("mlp.experts", GATE.cols, 2 * GATE.rows, 3 * GATE.experts)
    paths = [write(tmp_path / "q"), write(tmp_path / "experts", experts, r=3)]
    flags = [
        "--model",
        str(TINY_MODEL),
        "--device",
        "cpu",
        "--lora-dir",
        str(tmp_path),
        "--max-num-seqs",
        "4096",
    ]
    flags += ["--lora-modules", *(f"{path.name}={path}" for path in paths)]
    memory = run(capsys, *flags, "--ram", "2")["memory"]
    shared = command_parser().parse_args(flags)
    config = resolve(read_options({name: getattr(shared, name) for name in SHARED}, {}))
    left = (2 << 30) - memory["ram_weights"] - memory["ram_other"]  # once weights and processes have theirs
    of_files = sum(one.nbytes for one in open_adapters(config, SHAPE))
    monkeypatch.setattr(cpu_loading, "available_bytes", lambda: left - of_files)
    loaded = load_cpu_model(config, lambda *_: None)
    assert loaded.capacity.num_slots == memory["kv_tokens"] < 4096 * SHAPE.context_length
    engine = cpu_adapters(config, SHAPE, loaded.adapters, loaded.most_rows)
    assert engine is not None
    panels = sum(held.num_bytes for held in engine._held.values())
    assert memory["ram_adapters"] == panels + engine._shrunk.nbytes
    assert memory["ram_later_adapters"] == 1 << 30


def test_a_gpu_is_measured_on_its_own() -> None:
    """The same code on the CPU, with little to do."""
    rates = measure_gpu(torch.device("cpu"), nbytes=1 << 20, side=64)
    assert min(rates.read, rates.ops, rates.pcie) > 1e6


def test_a_small_batch_is_one_where_the_kernels_say_so() -> None:
    assert method_for(SMALL_BATCH_ROWS).block == 1
    assert method_for(SMALL_BATCH_ROWS + 1).block > 1

"""`moeserve plan` beside the engines: rates measured here, and what the GPU engine will take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.header import QWEN3_30B_A3B
from moeserve.cli import main
from moeserve.config import ServerConfig
from moeserve.kernels.experts.cuda import method_for
from moeserve.plan.gpu_constants import FEW_ROWS
from moeserve.plan.gpu_machine import measure_gpu
from moeserve.plan.memory import gpu_reserved_bytes
from moeserve.worker.gpu_memory import room_bytes


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


def test_a_gpu_is_measured_on_its_own() -> None:
    """The same code on the CPU, with little to do."""
    rates = measure_gpu(torch.device("cpu"), nbytes=1 << 20, side=64)
    assert min(rates.read, rates.ops, rates.pcie) > 1e6


@pytest.mark.parametrize(
    ("config", "in_a_step"),
    [
        (ServerConfig(), 512),
        (ServerConfig(max_model_len=8192, max_num_seqs=16), 3000),
        (ServerConfig(), 8192),
    ],
)
@pytest.mark.parametrize("floats", [False, True])
def test_what_the_gpu_engine_will_take_is_foreseen(
    config: ServerConfig, in_a_step: int, floats: bool
) -> None:
    taken = room_bytes(config, QWEN3_30B_A3B, in_a_step, torch.device("cuda"), float_weights=floats)
    foreseen = gpu_reserved_bytes(config, QWEN3_30B_A3B, in_a_step, float_weights=floats)
    assert foreseen == pytest.approx(taken, rel=0.01)


def test_few_rows_are_few_where_the_kernels_say_so() -> None:
    assert method_for(FEW_ROWS).block == 1
    assert method_for(FEW_ROWS + 1).block > 1

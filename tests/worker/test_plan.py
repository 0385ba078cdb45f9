"""`moeserve plan` beside the engines: rates measured here, and what the GPU engine will take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.cli import main
from moeserve.kernels.experts.op import method_for
from moeserve.models.step_buffers import SMALL_BATCH_ROWS
from moeserve.plan.gpu_machine import measure_gpu


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


def test_a_small_batch_is_one_where_the_kernels_say_so() -> None:
    assert method_for(SMALL_BATCH_ROWS).block == 1
    assert method_for(SMALL_BATCH_ROWS + 1).block > 1

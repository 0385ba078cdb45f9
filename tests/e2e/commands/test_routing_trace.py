"""A trace recorded by a server is one that `plan` predicts by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.cli.main import main
from moeserve.cli.plan import command
from moeserve.cli.plan.rates import CpuRates
from moeserve.placement.expert_cache.routing_trace import read_trace
from tests.e2e.completions import completion
from tests.support.servers.server import running_server

RATES = CpuRates(read=50e9, dense_ops=1e12, expert_ops=1e12, op_s=1e-6, step_s=1e-4, row_s=1e-5)


@pytest.mark.slow
def test_from_a_server_to_a_plan(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "real.trace"
    flags = ("--record-routing-trace", str(path), "--record-routing-tokens", "150")
    with running_server(tiny_model, *flags) as server:
        for seed in range(2):
            completion(
                server, prompt="Once upon a time", max_tokens=100, temperature=1, seed=seed, ignore_eos=True
            )
    trace = read_trace(path)
    assert trace.ids.shape == (150, 3, 2)
    assert tiny_model.name in trace.source
    monkeypatch.setattr(command, "measure_cpu", lambda *_: RATES)
    asked = [
        "--model",
        str(tiny_model),
        "--gpu-memory",
        "1.2",
        "--num-gpu-experts",
        "4",
        "--ram",
        "8",
        "--json",
    ]
    assert main(["plan", *asked, "--routing-trace", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert 0.3 < shown["speed"]["hit_rates"]["1"] <= 1.0
    assert not any("--record-routing-trace" in caution for caution in shown["cautions"])

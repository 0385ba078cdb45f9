"""`moeserve simulate`: what it prints and saves, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.cli import main as cli


def test_command_prints_a_table_and_saves_the_figures(tmp_path: Path) -> None:
    saved, plot, trace = tmp_path / "r.json", tmp_path / "p.svg", tmp_path / "t.jsonl"
    asked = "--dataset multi-turn --num-prompts 60 --request-rate 1 --max-total-tokens 50000 --goodput ttft:900 itl:300"
    files = ["--save-result", str(saved), "--plot", str(plot), "--save-trace", str(trace)]
    command = [sys.executable, "-m", "moeserve", "simulate", *asked.split(), *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    figures = json.loads(saved.read_bytes())
    assert figures["completed"] == 60
    assert 0 <= figures["request_goodput"] <= figures["request_throughput"]
    assert f"{figures['p99_ttft_ms']:.2f}" in run.stdout
    assert figures["worker_usage"] <= 1
    assert plot.read_text().startswith("<svg")
    again = ["--trace", str(trace), "--max-total-tokens", "50000", "--save-result", str(saved)]
    assert cli.main(["simulate", *again]) == 0
    assert math.isclose(json.loads(saved.read_bytes())["duration"], figures["duration"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--max-total-tokens is missing"),
        ("--max-total-tokens 63", "--max-total-tokens: must be between"),
        ("--max-total-tokens 640 --base-ms 5 --step-time x", "no effect beside --step-time"),
        ("--max-total-tokens 640 --step-time /no/such/file", "No such file"),
        ("--max-total-tokens 640 --trace /no/such/file", "No such file"),
        ("--max-total-tokens 640 --num-prompts 5 --plot /no/such/folder/x.svg", "No such file"),
    ],
)
def test_command_refuses_what_makes_no_sense(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["simulate", *arguments.split()]))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_measured_workers_defaults_are_the_simulations(tmp_path: Path) -> None:
    """A GPU's defaults: larger steps, and prompts first; equal to what flags of these values give, and not a CPU's."""

    def durations(*flags: str, **fields: object) -> list[float]:
        model, saved = tmp_path / "model.json", tmp_path / "saved.json"
        known = {"source": "made up", "tokens": [1, 8192], "seconds": [0.01, 0.1]}
        model.write_text(json.dumps(known | fields))
        workload = ("--input-len", "3000", "--output-len", "50", "--num-prompts", "8", "--request-rate", "4")
        files = ("--step-time", str(model), "--save-result", str(saved))
        assert cli.main(["simulate", *workload, *flags, "--max-total-tokens", "65536", *files]) == 0
        figures = json.loads(saved.read_text())
        return [figures["duration"], figures["mean_ttft_ms"]]

    by_flags = durations("--max-num-batched-tokens", "8192", "--prefill-share", "1")
    assert durations(step_tokens=8192, prompts_first=True) == by_flags
    assert durations()[1] > 1.2 * by_flags[1]


def test_command_fails_if_every_request_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Here for each is longer than the KV pool."""
    asked = ["simulate", "--max-total-tokens", "640", "--num-prompts", "4", "--random-output-len", "4"]
    assert cli.main([*asked, "--random-input-len", "5000"]) == 1
    assert "4 x " in capsys.readouterr().err
    assert cli.main([*asked, "--random-input-len", "64"]) == 0

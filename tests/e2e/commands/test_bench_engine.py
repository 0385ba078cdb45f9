"""`moeserve bench engine`, run as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.cli.bench.results import read_results
from tests.support.servers.server import common_flags


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moeserve", "bench", "engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_json_object_for_each_phase_and_batch() -> None:
    done = bench(
        *common_flags(), "--threads", "2", "--prompt", "40", "--gen", "6", "--batch", "1,3", "--json"
    )
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(f["phase"], f["batch"]) for f in figures] == [
        ("prefill", 1),
        ("decode", 1),
        ("prefill", 3),
        ("decode", 3),
    ]
    for figure in figures:
        assert set(figure) == {
            "phase",
            "batch",
            "prompt",
            "warm_up",
            "gen",
            "tok_s",
            "bytes_per_token",
            "gb_s",
            "read_gb_s",
            "cache",
        }
        assert figure["prompt"] == 40
        assert figure["gb_s"] == pytest.approx(figure["tok_s"] * figure["bytes_per_token"] / 1e9)
        assert figure["read_gb_s"] > 0
        assert figure["tok_s"] > 10
    one, three = (f["bytes_per_token"] for f in figures if f["phase"] == "decode")
    assert three < one  # weights are read once a step, whoever asks for them


@pytest.mark.slow
def test_a_table_for_people() -> None:
    """What warms up is a line of its own."""
    layout = ["--device", "cpu", "--weight-layout", "file"]
    lengths = ["--prompt", "8", "--warm-up", "3", "--gen", "2", "--batch", "1"]
    done = bench("--threads", "1", *lengths, *layout)
    assert done.returncode == 0, done.stderr
    assert "tok/s" in done.stdout
    rows = [line.split()[:4] for line in done.stdout.splitlines()[2:]]
    assert rows == [["prefill", "1", "8", "0"], ["warm-up", "1", "8", "3"], ["decode", "1", "8", "2"]]


@pytest.mark.slow
@pytest.mark.cpu_engine("it counts the bytes of every step")
def test_other_tokens_use_other_experts() -> None:
    flags = [*common_flags(), "--threads", "2", "--prompt", "8", "--gen", "12", "--batch", "2", "--json"]
    greedy, sampled = (
        json.loads(bench(*flags, "--temperature", t).stdout.splitlines()[-1])["bytes_per_token"]
        for t in ("0", "2")
    )
    assert greedy != sampled


@pytest.mark.parametrize(("flag", "value"), [("--batch", "0"), ("--temperature", "2.1")])
def test_a_bad_argument_is_named(flag: str, value: str) -> None:
    done = bench(flag, value)
    assert done.returncode == 2
    assert flag in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_figures_are_saved_to_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = [*common_flags(), "--threads", "2", "--prompt", "40", "--gen", "6", "--batch", "2"]
    done = bench(*flags, "--json", "--save-result", str(path))
    assert done.returncode == 0, done.stderr
    shown = {figure["phase"]: figure["tok_s"] for figure in map(json.loads, done.stdout.splitlines())}
    results = read_results(path)
    assert results.benchmark == "bench engine"
    assert results.settings["threads"] == "2"
    figures = {figure.name: figure for figure in results.figures}
    assert figures["prefill, batch 2, prompt 40"].value == shown["prefill"]
    assert figures["decode, batch 2, prompt 40, gen 6"].value == shown["decode"]
    assert figures["memory read"].unit == "GB/s"


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no folder" / "result.json"
    done = bench(*common_flags(), "--prompt", "8", "--gen", "1", "--batch", "1", "--save-result", str(path))
    assert done.returncode == 2
    assert "--save-result: " in done.stderr

"""Two runs of a benchmark beside each other: which way a figure counts, what is worse, files that are none."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.bench.results import (
    Measured,
    Results,
    ResultsError,
    read_results,
    results_of,
    write_results,
)

REPOSITORY = Path(__file__).resolve().parents[3]
SPEED = Measured("decode", 100.0, "tok/s", True)
WAIT = Measured("first token", 20.0, "ms", False)


def compare(arguments: list[str]) -> int:
    """The program's exit code; it runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(REPOSITORY / "benchmarks" / "compare.py"), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def run(path: Path, *figures: Measured, benchmark: str = "b", **settings: object) -> Path:
    write_results(path, results_of(benchmark, settings, figures))
    return path


def with_value(figure: Measured, value: float) -> Measured:
    return Measured(figure.name, value, figure.unit, figure.higher_is_better)


@pytest.mark.parametrize(
    ("speed", "wait", "code"),
    [(100, 20, 0), (96, 20, 0), (94, 20, 1), (130, 20, 0), (100, 20.9, 0), (100, 22, 1), (100, 5, 0)],
)
def test_worse_is_less_speed_or_more_waiting(tmp_path: Path, speed: float, wait: float, code: int) -> None:
    base = run(tmp_path / "base.json", SPEED, WAIT)
    new = run(tmp_path / "new.json", with_value(SPEED, speed), with_value(WAIT, wait))
    assert compare([str(base), str(new)]) == code


def test_the_tolerance_is_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = run(tmp_path / "base.json", SPEED), run(tmp_path / "new.json", with_value(SPEED, 80))
    assert compare([str(base), str(new), "--tolerance", "0.25"]) == 0
    assert compare([str(base), str(new)]) == 1
    assert "0.800  worse" in capsys.readouterr().out


def test_a_figure_that_is_gone_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = run(tmp_path / "base.json", SPEED, WAIT), run(tmp_path / "new.json", SPEED)
    assert compare([str(base), str(new)]) == 1
    assert "missing" in capsys.readouterr().out


def test_other_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = run(tmp_path / "a.json", SPEED, threads=2), run(tmp_path / "b.json", SPEED, threads=4)
    assert compare([str(base), str(new)]) == 0
    assert "caution: the setting threads differs: 2 | 4" in capsys.readouterr().out


def test_two_benchmarks_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = run(tmp_path / "a.json", SPEED), run(tmp_path / "b.json", SPEED, benchmark="c")
    assert compare([str(base), str(new)]) == 2
    assert "two benchmarks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "is other 1"),
        ({"version": 2}, "moeserve-benchmark 2"),
        ({"figures": [{"name": "x"}]}, "missing required field"),
        ({"more": 1}, "unknown field"),
        ({"figures": [{"name": "x", "value": 0, "unit": "s", "higher_is_better": True}]}, "above 0"),
        (
            {"figures": [{"name": "x", "value": 1, "unit": "s", "higher_is_better": True}] * 2},
            "more than one",
        ),
    ],
)
def test_a_file_that_no_benchmark_wrote(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = run(tmp_path / "a.json", SPEED)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ResultsError, match=said):
        read_results(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    results = results_of("b", {"threads": 2}, [SPEED, WAIT])
    write_results(tmp_path / "a.json", results)
    assert read_results(tmp_path / "a.json") == results


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "benchmarks" / "baselines").glob("*.json")), ids=lambda p: p.name
)
def test_the_baselines_can_be_compared(path: Path) -> None:
    baseline: Results = read_results(path)
    assert baseline.figures
    assert compare([str(path), str(path)]) == 0

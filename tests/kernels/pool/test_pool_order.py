"""The pool keeps an operation's memory, its slot, a phase and a unit until every thread is done with it.

Results do not show this, since they are complete before the last thread has left. `native/pool_order.cpp` holds a
thread at a chosen place and watches what must wait for it. Built with ThreadSanitizer, it also reports memory that two
threads use without an order between them, even where this machine keeps its loads and stores in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "moeserve" / "kernels" / "csrc"
SOURCE = ROOT / "tests" / "kernels" / "native" / "pool_order.cpp"
RACE = "two_threads_without_order"
SCENARIOS = [
    name for name in re.findall(r'^    {"(\w+)", ', SOURCE.read_text(), re.M) if name not in ("none", RACE)
]

# At a load of 30 the two files compile for minutes.
pytestmark = pytest.mark.timeout(900)

COMPILER = shlex.split(os.environ.get("CXX") or "c++")


@dataclass(frozen=True)
class Program:
    command: list[str]
    is_sanitized: bool

    def says(self, scenario: str) -> str:
        """Runs a scenario; empty if nothing was wrong."""
        run = subprocess.run([*self.command, scenario], capture_output=True, text=True, timeout=120)
        return run.stdout + run.stderr or ("" if run.returncode == 0 else f"exit status {run.returncode}")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"needs a C++ compiler, and there is no {COMPILER[0]}")
    folder = tmp_path_factory.mktemp("pool")
    sanitized = folder / "sanitized"
    # GCC warns that the sanitizer ignores fences: the pool's one is for late threads alone, which no scenario needs.
    if _build(sanitized, "-fsanitize=thread", "-Wno-tsan").returncode == 0:
        # With many random bits in addresses, older sanitizers find their own place taken.
        for prefix in ([], ["setarch", "--addr-no-randomize"]):
            candidate = Program([*prefix, str(sanitized)], is_sanitized=True)
            if (not prefix or shutil.which(prefix[0])) and not candidate.says("none"):
                return candidate
    plain = folder / "plain"
    built = _build(plain)
    assert built.returncode == 0, built.stderr
    return Program([str(plain)], is_sanitized=False)


def _build(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    sources = [SOURCE, CSRC / "pool" / "pool.cpp"]
    usual = ["-std=c++20", "-O1", "-g", "-pthread", f"-I{CSRC}"]
    command = [*COMPILER, *usual, *options, *sources, "-o", program]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_threads_keep_the_order(program: Program, scenario: str) -> None:
    assert program.says(scenario) == ""


def test_a_race_is_reported(program: Program) -> None:
    if not program.is_sanitized:
        pytest.skip("ThreadSanitizer does not run here: the scenarios check no order in memory")
    assert "data race" in program.says(RACE)

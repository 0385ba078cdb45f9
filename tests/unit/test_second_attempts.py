"""One more attempt for a test that is marked by name, none for any other, and what the summary says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.support.second_attempts import allow_second_attempts, report_second_attempts

def pytest_collection_modifyitems(items):
    allow_second_attempts(items)

def pytest_terminal_summary(terminalreporter):
    report_second_attempts(terminalreporter)
"""
TESTS = """
import pytest

attempts = {"marked": 0, "never right": 0, "plain": 0}

@pytest.mark.waits_for_processes("a process is slow")
def test_marked():
    attempts["marked"] += 1
    assert attempts["marked"] == 2

@pytest.mark.waits_for_processes("a process is slower")
def test_never_right():
    attempts["never right"] += 1
    raise AssertionError(f"attempt {attempts['never right']}")

def test_plain():
    attempts["plain"] += 1
    raise AssertionError(f"plain {attempts['plain']}")
"""


def run(root: Path, folder: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    (root / folder).mkdir(parents=True)
    (root / folder / "test_it.py").write_text(tests)
    (root / "conftest.py").write_text(CONFTEST)
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    waits_for_processes: see there\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_rerunfailures",
        "-q",
        folder,
    ]
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "PYTEST_ADDOPTS": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_only_a_marked_test_is_tried_again_once_and_the_summary_says_so(tmp_path: Path) -> None:
    out = run(tmp_path, "tests/e2e").stdout
    assert "1 passed" in out
    assert "2 failed" in out
    assert "2 rerun" in out
    assert "attempt 2" in out
    assert "attempt 3" not in out
    assert "plain 2" not in out
    assert "second attempts: 2" in out
    assert "tests/e2e/test_it.py::test_marked: passed then (a process is slow)" in out
    assert "tests/e2e/test_it.py::test_never_right: failed then (a process is slower)" in out


def test_what_is_computed_has_none(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/unit/router")
    assert done.returncode != 0
    assert "what is computed has no second attempt" in done.stdout + done.stderr


def test_a_mark_needs_its_reason(tmp_path: Path) -> None:
    done = run(tmp_path, "tests/e2e", TESTS.replace('("a process is slow")', ""))
    assert done.returncode != 0
    assert "needs the reason" in done.stdout + done.stderr

"""The set-up names what a machine lacks, and how to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_machine.sh"


def check(folder: Path, compiler: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Runs the script with a compiler of the test's making: a shell script, or none if it is empty."""
    if compiler:
        (folder / "cxx").write_text(f"#!/bin/sh\n{compiler}\n")
        (folder / "cxx").chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "CXX": str(folder / "cxx")}
    return subprocess.run([SCRIPT, python], env=environment, capture_output=True, text=True, timeout=120)


def test_a_machine_with_everything(tmp_path: Path) -> None:
    result = check(tmp_path, "case $1 in -dumpversion) echo 12.2.0;; *) echo g++ 12.2.0;; esac")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("", "apt install g++"),
        ("case $1 in -dumpversion) echo 10;; *) echo g++ 10;; esac", "g++ 11"),
        ("case $1 in -dumpversion) echo 13.0.1;; *) echo clang version 13;; esac", "clang++ 14"),
    ],
    ids=["no compiler", "old g++", "old clang"],
)
def test_compilers_that_will_not_do(tmp_path: Path, compiler: str, message: str) -> None:
    result = check(tmp_path, compiler)
    assert result.returncode != 0
    assert message in result.stderr


def test_a_machine_without_python(tmp_path: Path) -> None:
    result = check(tmp_path, "echo 12", python="python-unheard-of")
    assert result.returncode != 0
    assert "python3-venv" in result.stderr

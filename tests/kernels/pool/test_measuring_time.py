"""How long products are measured at a start: by CPU time, as a second by the clock is soon over on a busy machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILER = shlex.split(os.environ.get("CXX") or "c++")


def test_measuring_time(tmp_path: Path) -> None:
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"needs a C++ compiler, and there is no {COMPILER[0]}")
    source = ROOT / "tests" / "kernels" / "native" / "measuring_time.cpp"
    program = tmp_path / "measuring_time"
    include = ROOT / "moeserve" / "kernels" / "csrc"
    subprocess.run([*COMPILER, "-std=c++20", f"-I{include}", str(source), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")

"""`pip install .` on a machine without a C++ compiler: one line says what to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path) -> None:
    cmake, make = shutil.which("cmake"), shutil.which("make")
    if cmake is None or make is None:
        pytest.skip("needs cmake and make")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "make").symlink_to(make)
    done = subprocess.run(
        [
            *(cmake, "-G", "Unix Makefiles", "-S", str(REPOSITORY), "-B", str(tmp_path / "build")),
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert (
        "moeserve needs a C++20 compiler, and none was found: install one (Debian, Ubuntu: sudo apt" in said
    )
    assert done.stderr.count("CMake Error") == 1

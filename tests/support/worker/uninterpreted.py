"""Python in a process of its own, where Triton compiles kernels: those of the tests' own process are interpreted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_uninterpreted(*arguments: str) -> str:
    """Returns what Python prints with these arguments, which end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).resolve().parents[3],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

"""The RAM that the plan counts for a tower on the CPU, beside what a process takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.servers.server import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory() -> None:
    """Weights, while they are loaded too, and pictures of several sizes and shapes. The C library maps each block of
    its own, so that freed ones do not count."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.measuring.tower_memory_run"],
        cwd=REPOSITORY,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
        timeout=600,
    )
    found = {name: (planned, raised) for name, planned, raised in json.loads(run.stdout)}
    assert len(found) > 14
    off = {name: planned / raised for name, (planned, raised) in found.items()}
    assert {name: ratio for name, ratio in off.items() if not 0.97 < ratio < 1.03} == {}

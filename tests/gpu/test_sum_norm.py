"""The sum over GPUs within the norm behind it, captured and replayed, each GPU late in turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)


@pytest.mark.parametrize("gpus", [2, 4])
def test_gpus_sum_within_norms(gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    command = [sys.executable, "-m", "tests.gpu.sum_norm_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(gpus), str(tmp_path / "rendezvous")])
        for rank in range(gpus)
    ]
    assert [rank.wait(120) for rank in ranks] == [0] * gpus

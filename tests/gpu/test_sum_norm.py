"""The sum over two GPUs within the norm behind it, recorded and replayed, each GPU late in turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)


def test_two_gpus_sum_within_norms(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.sum_norm_rank"]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "rendezvous")]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]

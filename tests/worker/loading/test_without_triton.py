"""A machine without a GPU may lack Triton: `make serve` installs none beside torch's CPU build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WITHOUT = """
import sys
sys.modules["triton"] = None  # what imports it gets an ImportError
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.messages.channels import PushChannel
import moeserve.worker.__main__, moeserve.worker.service, moeserve.worker.loading.keeper
from moeserve.worker.loading.load import load_runner
from moeserve.cli.plan import command
config = resolve(ServerConfig(model=sys.argv[1], device="cpu", threads=1, max_model_len=64, max_total_tokens=256))
print(load_runner(config, lambda *_: None).ready().num_kv_slots)
"""


def test_the_cpu_engine_runs_without_triton(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tiny_model)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 256

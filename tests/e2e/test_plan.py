"""What `moeserve plan` says of memory is what a server then takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.process_memory import memory_of
from tests.support.server import REPOSITORY, clean_environment, running_server


@pytest.mark.skipif(torch.version.cuda is not None, reason="measured for torch without CUDA's libraries")
@pytest.mark.slow
def test_memory(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "moeserve", "plan", "--model", str(tiny_model), "--json"]
    said = subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, check=True, timeout=120
    )
    memory = json.loads(said.stdout)["memory"]
    with running_server(tiny_model) as server:
        body = {"prompt": [7] * 1500, "max_tokens": 16, "ignore_eos": True}
        used = server.post("/v1/completions", body)["usage"]["total_tokens"]
        taken = memory_of(server)
    kv = used * memory["ram_kv"] // memory["kv_tokens"]
    assert memory["ram_start"] + kv == pytest.approx(taken, rel=0.05)

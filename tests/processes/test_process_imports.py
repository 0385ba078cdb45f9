"""What a process imports when it starts, which takes most of its start."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("moeserve.launcher.launch", ["asyncio", "ssl", "numpy", "gguf", "yaml"]),
        ("moeserve.launcher.zygote.__main__", ["asyncio", "gguf", "yaml", "moeserve.models.qwen3moe"]),
        ("moeserve.httpserver.server", ["gguf", "yaml", "moeserve.models.qwen3moe"]),
        ("moeserve.worker.loading.cpu.load", ["gguf", "moeserve.models.qwen3moe"]),
    ],
)
def test_a_process_does_not_import_what_it_has_no_use_for(module: str, absent: list[str]) -> None:
    script = (
        f"import sys, moeserve.cli.main, {module}; print([name for name in {absent} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"

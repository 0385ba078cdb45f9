"""Runners of the fixtures on a GPU."""

from __future__ import annotations

from pathlib import Path

from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner
from tests.gpu.driver import small_config


def runner_of(model: Path, **options: object) -> Runner:
    config = small_config(model, device="cuda", gpu_prefill_token_threshold=1 << 20, threads=4, **options)
    runner = load_runner(config, lambda *_: None)
    assert isinstance(runner.engine, GpuEngine)
    return runner

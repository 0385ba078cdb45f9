"""Loads a runner from a configuration, on the device that the configuration selects."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.loading.progress import OnProgress
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.device import choose_device, gpu_numbers
from moeserve.worker.loading.self_test import check_logits
from moeserve.worker.loading.setup import open_weights, set_up_torch
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner

log = logging.getLogger(__name__)


def load_runner(
    config: ServerConfig,
    on_progress: OnProgress,
    forced_rows: int = 0,
    start: Start | None = None,
    spans: EmbeddingFiles | None = None,
) -> Runner:
    """Loads the model of `config.model` on the device that `config.device` selects, allocates everything that a step
    needs, and returns the runner.

    Raises ModelError for a bad file, ConfigError if the memory does not suffice, the CPU lacks `config.isa`, or the
    device does not exist. The first worker tests the model (`self_test.py`). forced_rows: largest number of rows of
    steps whose routing is taken from a trace, for measurements. start: see `Start`; None: a first start. spans: where
    requests' embeddings lie; None: requests have none, as with several GPUs.
    """
    start = start or Start()
    runner = _load_on_device(config, on_progress, forced_rows, start, spans)
    if start.is_first:
        check_logits(runner, Path(config.model))
        start.clock.ended("first step")
    log.info("loaded in %.2f s: %s", sum(start.clock.seconds.values()), start.clock.described())
    return runner


def _load_on_device(
    config: ServerConfig,
    on_progress: OnProgress,
    forced_rows: int,
    start: Start,
    spans: EmbeddingFiles | None,
) -> Runner:
    if choose_device(config.device) == "cpu":
        if forced_rows:
            raise ConfigError("--routing-trace: the CPU engine has all experts in one place; leave it out")
        return load_cpu_runner(config, on_progress, spans)
    set_up_torch()
    from moeserve.kernels.launch import hash_sources  # imported late: a machine without a GPU may lack Triton
    from moeserve.worker.loading.gpu.load import load_gpu_runner

    numbers = gpu_numbers(config)
    if len(numbers) > 1:
        from moeserve.worker.loading.group.load import load_group_runner

        return load_group_runner(config, open_weights(config), on_progress, numbers, start, forced_rows)
    hashing = threading.Thread(target=hash_sources, name="hash", daemon=True)
    hashing.start()  # while the driver starts
    torch.cuda.set_device(numbers[0])
    device = torch.device("cuda", numbers[0])
    torch.zeros(1, device=device)  # creates the GPU's context
    start.clock.ended("GPU")
    source = start.inherited.source or open_weights(config)
    return load_gpu_runner(config, source, on_progress, device, start, forced_rows, spans)

"""The GPU engine over a model file without a server: the logits of every position of a text."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.kernels.triton_device import DEVICE, counter  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.open import open_model
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import GREEDY, Driver, small_config

HEAD_ROWS = 16
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 256, "max_total_tokens": 512}


def load(path: Path, **options: object) -> Runner:
    """A runner of four requests of up to 256 tokens. options: flags in place of these, and others."""
    config = small_config(path, **{**SIZES, "threads": 1, **options})
    return load_gpu_runner(config, open_model(path), lambda *_: None, torch.device(DEVICE), Start())


def logits_of(runner: Runner, slot: int, tokens: list[int], chunk: int) -> torch.Tensor:
    """float32 [len(tokens), vocab], of steps of `chunk` tokens."""
    assert isinstance(runner.engine, GpuEngine)
    model, driver, found = runner.engine._model, Driver(runner), []
    new = [driver.new(slot, tokens, GREEDY)]
    for first in range(0, len(tokens), chunk):
        count = min(chunk, len(tokens) - first)
        driver.step(new, [driver.row(slot, count, sample=first + count == len(tokens))])
        new = []
        for row in range(0, count, HEAD_ROWS):
            n = min(HEAD_ROWS, count - row)
            rows = torch.zeros(HEAD_ROWS, dtype=torch.int32, device=DEVICE)
            rows[:n] = torch.arange(row, row + n)
            found.append(model.logits(runner.engine._step.size, rows, counter(n))[:n].cpu().clone())
    return torch.cat(found)

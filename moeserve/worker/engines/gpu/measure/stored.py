"""Keeps a GPU's step measurements on disk, next to Triton's compiled kernels, so that the next worker need not
repeat them.

There is one file per key; the key covers everything that affects the speed of steps (`stored_measurements`). The router
starts with these values; what it learns from served steps outlives the worker.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import torch
import triton

import moeserve.kernels
from moeserve import __version__
from moeserve.config import ServerConfig
from moeserve.kv.capacity import KvCapacity
from moeserve.messages.steps import MeasuredStep
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import ModelSource
from moeserve.worker.engines.gpu.measure.calibration import Calibration
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming

FOLDER: Final = "moeserve-steps"  # folder in Triton's cache
# Limit of numbers in a file: tokens, positions and rows, and milliseconds.
MOST: Final = 1 << 30
LONGEST_MS: Final = 1e7

log = logging.getLogger(__name__)


class Measured(msgspec.Struct, frozen=True):
    steps: list[MeasuredStep]
    # The fields of `Calibration`; None: not calibrated.
    streamed: list[tuple[int, float]] | None = None
    threshold: int | None = None

    @property
    def calibration(self) -> Calibration | None:
        if self.streamed is None:
            return None
        return Calibration(self.threshold, Streaming(tuple(self.streamed)))

    def check(self) -> None:
        """Raises ValueError for impossible durations, and for points that `Streaming` rejects."""
        for step in self.steps:
            rows, context, start, prompt, ms = msgspec.structs.astuple(step)
            if min(rows, context, start, prompt) < 0 or not rows + prompt or max(rows, start, prompt) > MOST:
                raise ValueError(f"no step has {rows} rows and {prompt} tokens from {start} on")
            if not 0.0 < ms < LONGEST_MS or context > rows * MOST:
                raise ValueError(f"no step takes {ms} ms for {context} positions")
        points = self.streamed or []
        if any(not 0.0 <= part <= 1.0 for _, part in points):
            raise ValueError("a part that is streamed is between 0 and 1")
        if any(
            not 0 <= tokens <= MOST for tokens in [*(tokens for tokens, _ in points), self.threshold or 0]
        ):
            raise ValueError(f"steps of 0 to {MOST} tokens are streamed")
        if any(low >= high for low, high in pairwise(tokens for tokens, _ in points)):
            raise ValueError("the steps that are streamed do not ascend")


class StoredMeasurements:
    """The measurements of one key, in `folder`, which is created at the first write."""

    def __init__(self, folder: Path, key: str) -> None:
        self._file = folder / f"{key}.json"

    def read(self) -> Measured | None:
        """Returns the stored measurements; None if there are none or the file is invalid: any program may write to a
        cache."""
        try:
            measured = msgspec.json.decode(self._file.read_bytes(), type=Measured)
            measured.check()
            return measured
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("%s is measured anew: %s", self._file, error)
            return None

    def write(self, steps: Sequence[MeasuredStep], calibration: Calibration | None) -> None:
        """Replaces the file atomically. If that fails, a warning is logged, and the next worker measures again."""
        measured = Measured(list(steps))
        if calibration is not None:
            points = list(calibration.streaming.points)
            measured = Measured(list(steps), points, calibration.threshold)
        unnamed = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unnamed.write_bytes(msgspec.json.encode(measured))
            unnamed.replace(self._file)
        except OSError as error:
            log.warning("the measured times of steps cannot be kept: %s", error)


def stored_measurements(
    config: ServerConfig,
    source: ModelSource,
    shape: ModelShape,
    capacity: KvCapacity,
    max_tokens: int,
    engine: str,
    device: torch.device,
) -> StoredMeasurements:
    """Returns the stored measurements for this machine, model and configuration. engine: the engine's description,
    including the placement of weights."""
    key = step_key(
        __version__,
        torch.__version__,
        triton.__version__,
        kernel_sources(),
        torch.cuda.get_device_name(device),
        torch.cuda.mem_get_info(device)[1],
        engine,
        shape,
        [(name, tensor.type, tensor.shape) for name, tensor in source.tensors.items()],
        (capacity.max_model_len, config.max_num_seqs, max_tokens, config.kv_cache_dtype),
        (config.gpu_prefill_token_threshold, config.expert_cache, config.unpacked_experts),
        (config.placement_rules, config.lora_modules, config.lora_dir, config.speculative_config),
    )
    return StoredMeasurements(Path(triton.knobs.cache.dir) / FOLDER, key)


def step_key(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]


@cache  # cached: later workers are forks of a process that has called it, and run the code imported then
def kernel_sources() -> str:
    """Returns a hash of the sources of all kernels and of the code that launches them. The version is not enough: in
    a checkout the sources change without it."""
    found = hashlib.sha256()
    for path in sorted(Path(moeserve.kernels.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()

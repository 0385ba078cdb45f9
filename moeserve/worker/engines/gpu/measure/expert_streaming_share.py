"""Calibrates which part of the RAM experts steps stream, with steps of the engine itself."""

from __future__ import annotations

import time

from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.measure.calibration import Calibration, calibrate

SIZES = (64, 128, 256, 512, 1024, 2048)  # tokens of the steps that are timed


def time_prompt(engine: GpuEngine, n: int, streamed: float) -> float:
    """Seconds of a step of a prompt of n tokens for which this part of the RAM experts is streamed, the better of two.
    Before the first request."""
    run = engine.dummy_steps.prompt(n, streamed)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def calibrate_streaming(engine: GpuEngine, max_model_len: int) -> Calibration:
    """Finds out which part to stream, in some seconds, and tells the engine; it may be nothing, whatever the step."""
    limit = min(engine.max_step_rows, max_model_len)
    sizes = [size for size in SIZES if size <= limit]
    found = calibrate(lambda n, streamed: time_prompt(engine, n, streamed), sizes)
    engine.stream_by(found.streaming, found.described())
    return found

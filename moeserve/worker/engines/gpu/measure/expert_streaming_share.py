"""Calibrates the fraction of the RAM experts that steps stream, with steps of the engine itself."""

from __future__ import annotations

import time

from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.measure.calibration import Calibration, calibrate

SIZES = (64, 128, 256, 512, 1024, 2048)  # tokens per timed step


def time_prompt(engine: GpuEngine, n: int, streamed: float) -> float:
    """Returns the seconds, the better of two runs, of a prompt step of n tokens that streams the fraction `streamed` of
    the RAM experts. May be called only before the first request."""
    run = engine.dummy_steps.prompt(n, streamed)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def calibrate_streaming(engine: GpuEngine, max_model_len: int) -> Calibration:
    """Measures, in some seconds, which fraction of the experts in RAM to stream by step size, sets it in the engine,
    and returns the measurement; the fraction may be 0 for all sizes."""
    limit = min(engine.max_step_rows, max_model_len)
    sizes = [size for size in SIZES if size <= limit]
    found = calibrate(lambda n, streamed: time_prompt(engine, n, streamed), sizes)
    engine.stream_by(found.streaming, found.described())
    return found

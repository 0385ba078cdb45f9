"""Warm-up of a GPU engine: compile kernels, capture CUDA graphs, time steps.

Measurements are kept on disk (`engines/gpu/measure/stored.py`) for the next start and the next worker. A worker that
replaces a lost one postpones everything that its first step does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from moeserve.config import ServerConfig
from moeserve.messages.steps import MeasuredStep
from moeserve.models.loading.progress import TIMING, OnProgress
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.measure.calibration import Calibration
from moeserve.worker.engines.gpu.measure.expert_streaming_share import calibrate_streaming
from moeserve.worker.engines.gpu.measure.parts import choose_parts
from moeserve.worker.engines.gpu.measure.steps import measure_steps
from moeserve.worker.engines.gpu.measure.stored import StoredMeasurements
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.loading.start import Start


def start_steps(
    engine: GpuEngine,
    config: ServerConfig,
    max_model_len: int,
    start: Start,
    on_progress: OnProgress,
    ranks: RankGroup | None,
    stored: StoredMeasurements | None,
    *,
    before_timing: Callable[[], None],
    is_gpu: bool,
) -> Sequence[MeasuredStep]:
    """Warms the engine up, sets which steps stream RAM experts and, over several GPUs, into how many parts steps are
    divided. Returns the durations of steps by their size; empty if none are known.

    stored: where earlier starts stored this engine's measurements; if there are any, no step is timed for the
    durations, and in a replacement worker the warm-up is put off. None: do not store any. before_timing: called after
    the warm-up, before any step runs. is_gpu: False for Triton's interpreter, whose steps take seconds and are not
    timed."""
    found = None if stored is None else stored.read()
    if found is not None and not start.is_first:
        engine.warm_up.put_off()
    else:
        _warm_up(engine, start, on_progress, ranks)
    before_timing()
    if is_gpu and ranks is not None and engine.facts.takes_parts:
        choose_parts(engine, max_model_len, ranks.of_leader)
    calibration = None
    if engine.can_stream:
        calibration = _choose_streaming(
            engine,
            config.gpu_prefill_token_threshold,
            max_model_len,
            None if found is None else found.calibration,
        )
    steps: Sequence[MeasuredStep] = []
    if found is not None:
        steps = found.steps
    elif is_gpu:
        same = None if ranks is None else ranks.agree
        steps = measure_steps(engine, config.max_num_seqs, max_model_len, same, partial(on_progress, TIMING))
        if stored is not None:
            stored.write(steps, calibration)
    start.clock.ended("timing steps")
    return steps


def _warm_up(engine: GpuEngine, start: Start, on_progress: OnProgress, ranks: RankGroup | None) -> None:
    if ranks is None:
        engine.warm_up.compile(on_progress)
    else:
        # the other ranks load its kernels from disk
        ranks.first_alone(lambda: engine.warm_up.compile(on_progress))
    start.clock.ended("kernels")
    engine.warm_up.capture(on_progress)
    start.clock.ended("graphs")


def _choose_streaming(
    engine: GpuEngine, threshold: int | None, max_model_len: int, found: Calibration | None
) -> Calibration | None:
    """Sets which fraction of RAM experts the engine streams. Returns the calibration; None if nothing was calibrated.
    found: an earlier start's calibration."""
    if threshold is not None:
        engine.stream_by(Streaming.from_tokens(threshold), f"streamed to steps of {threshold} tokens on")
        return None
    if found is not None:
        engine.stream_by(found.streaming, found.described())
        return found
    with engine.alone():
        return calibrate_streaming(engine, max_model_len)

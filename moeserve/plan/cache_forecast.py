"""What the expert cache will find on the GPU: its policy replayed on a routing trace, recorded or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeserve.errors import ConfigError
from moeserve.expert_cache.generate import PRESETS, generate
from moeserve.expert_cache.replay import Replayed, Steps, StepUse, replay_cache
from moeserve.expert_cache.routing_trace import RoutingTrace, read_trace
from moeserve.models.interface import ModelShape
from moeserve.placement import ModelSizes, Placement

ASSUMED = "local"
WARM_UP, STEPS = 64, 64  # of a replay, what comes before and what counts
MOST_STREAMS = 16  # more streams of different texts leave a cache little to follow


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Of so many streams, when the cache has filled."""

    hit_rate: float
    promoted_bytes: float  # in a step
    steps: list[StepUse]  # a layer that has no cache counts nothing


@dataclass(frozen=True, slots=True)
class CacheForecast:
    source: str  # of the trace, for people
    is_assumed: bool
    by_streams: dict[int, CacheUse]


def forecast_cache(
    model: ModelShape,
    sizes: ModelSizes,
    placement: Placement,
    streams: Sequence[int],
    trace_file: str | None,
    step_bytes: int,
) -> CacheForecast | None:
    """None: experts stay where they are. step_bytes: promoted in a step at most. Raises ConfigError for a trace of
    another shape."""
    if not placement.has_cache:
        if trace_file is not None:
            raise ConfigError("--routing-trace: experts stay where they are in this plan; leave it out")
        return None
    counts = [count for count in streams if count <= MOST_STREAMS]
    trace = _trace(model, max(counts, default=1), trace_file)
    shape = (model.num_layers, model.num_experts)
    cached, movable = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for index, layer in enumerate(placement.layers):
        if layer.is_cached:
            cached[index, list(layer.gpu_experts)] = True
            movable[index, [e for e in range(layer.num_experts) if e not in layer.fixed]] = True
    expert = max(
        size.expert.cpu for size, layer in zip(sizes.layers, placement.layers, strict=True) if layer.is_cached
    )
    most = max(1, step_bytes // expert)
    found = {}
    for count in counts:
        if len(trace.ids) // count <= WARM_UP:
            continue  # too short a trace for so many
        found[count] = _use(trace, count, cached, movable, most, expert)
    if not found:
        raise ConfigError(f"--routing-trace: {len(trace.ids)} tokens are too few; {2 * WARM_UP} are needed")
    return CacheForecast(trace.source, trace_file is None, found)


def _trace(model: ModelShape, streams: int, trace_file: str | None) -> RoutingTrace:
    wanted = (model.num_layers, model.num_experts, model.top_k)
    if trace_file is None:
        layers, experts, top_k = wanted
        source = f"preset {ASSUMED}"
        tokens = streams * (WARM_UP + STEPS)
        return generate(PRESETS[ASSUMED], source, tokens=tokens, layers=layers, experts=experts, top_k=top_k)
    trace = read_trace(Path(trace_file))
    if trace.shape != wanted:
        raise ConfigError(
            "--routing-trace: it is of {} layers of {} experts, {} a token; the model has {}, {} and {}".format(
                *trace.shape, *wanted
            )
        )
    return trace


def _use(
    trace: RoutingTrace,
    streams: int,
    cached: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    movable: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    most: int,
    expert: int,
) -> CacheUse:
    steps = Steps(trace, streams)
    uses: list[StepUse] = []
    replayed: Replayed = replay_cache(steps, cached, movable=movable, most=most, uses=uses)
    has_cache = movable.any(axis=1)
    counted = [StepUse(u.used * has_cache, u.missed * has_cache) for u in uses[WARM_UP:]]
    used, missed = (sum(int(field.sum()) for field in fields) for fields in zip(*counted, strict=True))
    return CacheUse(1.0 - missed / max(1, used), replayed.promotions_per_step * expert, counted)

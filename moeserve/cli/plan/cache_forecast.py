"""Forecasts the hit rate of the expert cache, or of the RAM slots of experts on disk: replays the policy on a recorded
or an assumed routing trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeserve.errors import ConfigError
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import step_sizes
from moeserve.placement import ModelSizes, Placement
from moeserve.placement.expert_cache.fetching import replay_fetches, rows_that_fetch, share_without_slot
from moeserve.placement.expert_cache.generate import PRESETS, generate
from moeserve.placement.expert_cache.policy import STEP_BYTES, UNSTREAMED_STEP_BYTES, Mask
from moeserve.placement.expert_cache.replay import SETTLING_STEPS, Steps, StepUse, replay_cache
from moeserve.placement.expert_cache.replay_disk import Masks, replay_disk
from moeserve.placement.expert_cache.routing_trace import RoutingTrace, read_trace
from moeserve.placement.expert_pins import Pinned

ASSUMED = "local"
STEPS = 64  # measured steps at least, after those in which the cache settles
MOST_STREAMS = 16  # with more streams of different texts, a cache has little to follow


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The use of the expert cache, or of the RAM slots of experts on disk, by steps with a given number of streams. A
    layer without either has counts of 0."""

    steps: list[StepUse]
    expert_bytes: npt.NDArray[np.int64]  # [layers]: bytes of one expert
    fetches: bool = False  # promoted experts were fetched within the steps

    @property
    def hit_rate(self) -> float:
        used = sum(int(step.used.sum()) for step in self.steps)
        missed = sum(int(step.missed.sum()) for step in self.steps)
        return 1.0 - missed / max(1, used)

    @property
    def promoted_bytes(self) -> npt.NDArray[np.float64]:
        """Returns the bytes promoted in each step: [steps]."""
        return np.array([step.promoted @ self.expert_bytes for step in self.steps], np.float64)

    @property
    def missed_bytes(self) -> float:
        """Returns the bytes of the experts that a step misses, on average."""
        return float(np.mean([step.missed @ self.expert_bytes for step in self.steps]))


@dataclass(frozen=True, slots=True)
class CacheForecast:
    """A forecast. `settled` and `at_first` are by the number of streams, for the numbers that the trace is long enough
    for."""

    is_assumed: bool  # the trace is assumed; else it was recorded
    settled: dict[int, CacheUse]
    at_first: dict[
        int, CacheUse
    ]  # the first SETTLING_STEPS steps, starting with arbitrary experts in the cache


def trace_tokens(streams: int) -> int:
    """Returns the number of tokens that a trace must have for this number of streams."""
    return streams * (SETTLING_STEPS + STEPS)


def forecast_cache(
    model: ModelShape,
    sizes: ModelSizes,
    placement: Placement,
    streams: Sequence[int],
    trace_file: str | None,
    fetches: bool = False,
    has_drafts: bool = False,
) -> CacheForecast | None:
    """Returns the forecast; None if experts stay where they are placed. fetches: whether steps may fetch experts.
    has_drafts: whether steps may have drafts. Raises ConfigError for a trace of another shape, or with too few tokens
    for one stream."""
    if not placement.has_cache:
        if trace_file is not None:
            raise ConfigError(
                "--routing-trace: has no effect, because no experts move in this plan; leave it out"
            )
        return None
    cached, movable = _on_gpu(model, placement)
    expert_bytes = np.array([of.expert.cpu for of in sizes.layers], np.int64)
    most = _promoted_at_once(sizes, placement, movable)
    rows = range(0)
    has_cache: Mask = np.any(movable, axis=1)
    if fetches and has_cache.any():
        rows = rows_that_fetch(model.top_k, share_without_slot(movable, cached), has_drafts=has_drafts)

    fetching = [count for count in streams if step_sizes(count)[-1] in rows]

    def replay(steps: Steps) -> list[StepUse]:
        if steps.streams in fetching:
            return _of_layers(has_cache, replay_fetches(steps, cached, movable))
        return _replayed(steps, cached, movable, most)

    return _forecast(model, streams, trace_file, expert_bytes, replay, fetching)


def can_fetch(sizes: ModelSizes, placement: Placement) -> bool:
    """Returns whether the experts that move are quantised; such experts are fetched within steps."""
    layers = zip(sizes.layers, placement.layers, strict=True)
    return all(of.unpacked for of, layer in layers if layer.is_cached)


def forecast_disk(
    model: ModelShape,
    sizes: ModelSizes,
    slots: Sequence[int],
    pinned: Pinned,
    streams: Sequence[int],
    trace_file: str | None,
    placement: Placement | None = None,
) -> CacheForecast:
    """Returns the forecast of experts on disk. slots: RAM slots of each layer. pinned: experts that stay in
    RAM. placement: that of a GPU engine, on which RAM is only asked for the GPU's misses; None: without a
    GPU. Raises ConfigError as `forecast_cache` does."""
    stays = np.zeros((model.num_layers, model.num_experts), np.bool_)
    for layer, experts in enumerate(pinned):
        stays[layer, list(experts)] = True
    expert_bytes = np.array([of.expert.cpu for of in sizes.layers], np.int64)
    return _forecast(
        model,
        streams,
        trace_file,
        expert_bytes,
        lambda steps: replay_disk(
            steps if placement is None else _misses_of_gpu(steps, model, sizes, placement),
            slots,
            model.num_experts,
            pinned=stays,
        ),
    )


def _on_gpu(model: ModelShape, placement: Placement) -> tuple[Mask, Mask]:
    """Returns two masks, bool [layers, experts], of layers with a cache: the experts that are in GPU memory at first,
    and the experts that may move."""
    shape = (model.num_layers, model.num_experts)
    cached, movable = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for index, layer in enumerate(placement.layers):
        if layer.is_cached:
            cached[index, list(layer.gpu_experts)] = True
            movable[index, [e for e in range(layer.num_experts) if e not in layer.fixed]] = True
    return cached, movable


def _promoted_at_once(sizes: ModelSizes, placement: Placement, movable: Mask) -> int:
    expert_bytes = np.array([of.expert.cpu for of in sizes.layers], np.int64)
    largest = int((expert_bytes * movable.any(axis=1)).max())
    return max(1, _step_bytes(sizes, placement) // largest) if largest else 0


def _misses_of_gpu(steps: Steps, model: ModelShape, sizes: ModelSizes, placement: Placement) -> Masks:
    cached, movable = _on_gpu(model, placement)
    for index, layer in enumerate(placement.layers):
        cached[index, list(layer.gpu_experts)] = True
    missed: list[Mask] = []
    most = _promoted_at_once(sizes, placement, movable)
    replay_cache(steps, cached, movable=movable, most=most, missed=missed)
    return Masks(missed)


def _forecast(
    model: ModelShape,
    streams: Sequence[int],
    trace_file: str | None,
    expert_bytes: npt.NDArray[np.int64],
    replay: Callable[[Steps], list[StepUse]],
    fetching: Sequence[int] = (),
) -> CacheForecast:
    recorded = None if trace_file is None else _read(model, trace_file)
    settled, at_first = {}, {}
    for count in streams:
        if count > MOST_STREAMS:
            continue
        trace = recorded or _assumed(model, count)
        if len(trace.ids) < trace_tokens(count):
            continue
        steps = replay(Steps(trace, count))
        at_first[count] = CacheUse(steps[:SETTLING_STEPS], expert_bytes, count in fetching)
        settled[count] = CacheUse(steps[SETTLING_STEPS:], expert_bytes, count in fetching)
    if recorded is not None and not settled:
        raise ConfigError(
            f"--routing-trace: {len(recorded.ids)} tokens are too few; record at least {trace_tokens(1)} "
            "(--record-routing-tokens)"
        )
    return CacheForecast(recorded is None, settled, at_first)


def _step_bytes(sizes: ModelSizes, placement: Placement) -> int:
    """Returns the most bytes that one step promotes. They pass through a buffer: one of those for streamed prompts,
    which holds the RAM experts of any one layer, or else a buffer of its own."""
    if not placement.stream_bytes:
        return UNSTREAMED_STEP_BYTES
    on_gpu = slice(placement.layers_in_ram, None)
    layers = zip(sizes.layers[on_gpu], placement.gpu_layers, strict=True)
    return min(STEP_BYTES, max(layer.num_cpu_experts * of.expert.cpu for of, layer in layers))


def _assumed(model: ModelShape, streams: int) -> RoutingTrace:
    """Returns an assumed trace with a different text for each stream."""
    return generate(
        PRESETS[ASSUMED],
        f"preset {ASSUMED}",
        tokens=trace_tokens(streams),
        layers=model.num_layers,
        experts=model.num_experts,
        top_k=model.top_k,
        topic_tokens=trace_tokens(1),
    )


def _read(model: ModelShape, trace_file: str) -> RoutingTrace:
    wanted = (model.num_layers, model.num_experts, model.top_k)
    trace = read_trace(Path(trace_file))
    if trace.shape != wanted:
        raise ConfigError(
            "--routing-trace: it records {} layers of {} experts, {} per token; the model has {}, {} and {}: record "
            "one with this model (--record-routing-trace)".format(*trace.shape, *wanted)
        )
    return trace


def _replayed(steps: Steps, cached: Mask, movable: Mask, most: int) -> list[StepUse]:
    uses: list[StepUse] = []
    replay_cache(steps, cached, movable=movable, most=most, uses=uses)
    return _of_layers(np.any(movable, axis=1), uses)


def _of_layers(chosen: Mask, uses: Sequence[StepUse]) -> list[StepUse]:
    """Returns the use with zeros for other layers. chosen: bool [layers]."""
    return [StepUse(*(field * chosen for field in use)) for use in uses]

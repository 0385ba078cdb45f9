"""What a plan expects of the expert cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeserve.cli.plan.cache_forecast import can_fetch, forecast_cache
from moeserve.placement import Gpu, ModelSizes, Placement, PlacementOptions, place
from moeserve.placement.expert_cache.generate import LOCAL, generate
from moeserve.placement.expert_cache.policy import STEP_BYTES, UNSTREAMED_STEP_BYTES
from moeserve.placement.expert_cache.replay import SETTLING_STEPS
from moeserve.placement.expert_cache.routing_trace import RoutingTrace, write_trace
from tests.support.models.model_header import qwen3moe
from tests.support.router.placement_world import model

LAYERS = 24  # enough exchanges that the policy soon knows whether they pay
SHAPE = qwen3moe(num_layers=LAYERS, context_length=4096, vocab_size=1000)


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return model(layers=LAYERS, experts=128)


@pytest.fixture(scope="module")
def placement(sizes: ModelSizes) -> Placement:
    return place(sizes, PlacementOptions(num_gpu_experts=96), Gpu(64 << 30, 0)).with_cache(sizes)


def test_assumed_streams_have_texts_of_their_own(
    sizes: ModelSizes, placement: Placement, tmp_path: Path
) -> None:
    """Found as often as those of four texts that were drawn apart; one text's parts have experts in common."""
    parts = [
        generate(LOCAL, "", tokens=2 * SETTLING_STEPS, layers=LAYERS, experts=128, top_k=8, seed=seed).ids
        for seed in range(4)
    ]
    write_trace(tmp_path / "apart", RoutingTrace("four texts", 128, np.concatenate(parts)))
    apart = forecast_cache(SHAPE, sizes, placement, [4], str(tmp_path / "apart"))
    assumed = forecast_cache(SHAPE, sizes, placement, [1, 4], None)
    assert apart is not None
    assert assumed is not None
    assert not apart.is_assumed
    assert assumed.is_assumed
    assert assumed.settled[4].hit_rate == pytest.approx(apart.settled[4].hit_rate, abs=0.015)
    assert assumed.settled[4].hit_rate < assumed.settled[1].hit_rate


def test_steps_are_divided_where_the_cache_has_settled(sizes: ModelSizes, placement: Placement) -> None:
    """Promotions are of the steps that count, and in the first ones come those that another text needs."""
    forecast = forecast_cache(SHAPE, sizes, placement, [1], None)
    assert forecast is not None
    first, later = forecast.at_first[1], forecast.settled[1]
    assert len(first.steps) == len(later.steps) == SETTLING_STEPS
    assert first.hit_rate < later.hit_rate
    assert first.promoted_bytes.sum() > 1.3 * later.promoted_bytes.sum() > 0
    assert later.promoted_bytes.max() <= STEP_BYTES


def test_promotions_pass_through_the_buffers_of_streamed_prompts(sizes: ModelSizes) -> None:
    """These hold the experts that a layer has in RAM alone: six, where nearly all are on the GPU."""
    options = PlacementOptions(num_gpu_experts=122)
    nearly_all = place(sizes, options, Gpu(64 << 30, 0)).with_cache(sizes)
    forecast = forecast_cache(SHAPE, sizes, nearly_all, [4], None)
    assert forecast is not None
    uses = forecast.at_first[4]
    assert max(step.promoted.sum() for step in uses.steps) == 6 < STEP_BYTES // sizes.layers[0].expert.cpu


def test_promotions_have_less_room_where_nothing_streams(sizes: ModelSizes) -> None:
    few = place(sizes, PlacementOptions(num_gpu_experts=32), Gpu(64 << 30, 0)).with_cache(sizes)
    most = []
    for stream_bytes in (few.stream_bytes, 0):
        forecast = forecast_cache(SHAPE, sizes, replace(few, stream_bytes=stream_bytes), [4], None)
        assert forecast is not None
        most.append(max(step.promoted.sum() for step in forecast.at_first[4].steps))
    assert most[0] > most[1] == UNSTREAMED_STEP_BYTES // max(layer.expert.cpu for layer in sizes.layers)


def test_steps_of_several_rows_fetch(sizes: ModelSizes) -> None:
    """Then more experts are found, although a step exchanges no more of them than it misses."""
    half = place(sizes, PlacementOptions(num_gpu_experts=64), Gpu(64 << 30, 0)).with_cache(sizes)
    promoted, fetched, beside_drafts = (
        forecast_cache(SHAPE, sizes, half, [1, 2, 3, 4], None, *options)
        for options in ((False, False), (True, False), (True, True))
    )
    assert promoted is not None
    assert fetched is not None
    assert beside_drafts is not None
    fetching = [[use.fetches for use in of.settled.values()] for of in (promoted, fetched, beside_drafts)]
    # Three rows are padded to four.
    assert fetching == [[False] * 4, [False, True, True, True], [False, False, True, True]]
    assert fetched.settled[1].hit_rate == promoted.settled[1].hit_rate
    assert fetched.settled[4].hit_rate > promoted.settled[4].hit_rate + 0.01
    assert all((step.promoted <= step.missed).all() for step in fetched.settled[4].steps)


def test_floats_are_not_fetched(sizes: ModelSizes, placement: Placement) -> None:
    layers = tuple(replace(layer, unpacked=1) for layer in sizes.layers)
    quantised, mixed = replace(sizes, layers=layers), replace(sizes, layers=(*layers[:-1], sizes.layers[-1]))
    assert can_fetch(quantised, placement)
    assert not can_fetch(mixed, placement)


def test_too_many_streams_for_a_trace_are_left_out(
    sizes: ModelSizes, placement: Placement, tmp_path: Path
) -> None:
    trace = generate(LOCAL, "", tokens=4 * SETTLING_STEPS, layers=LAYERS, experts=128, top_k=8)
    write_trace(tmp_path / "short", trace)
    forecast = forecast_cache(SHAPE, sizes, placement, [1, 2, 4, 32], str(tmp_path / "short"))
    assert forecast is not None
    assert list(forecast.settled) == list(forecast.at_first) == [1, 2]

"""The planner's model of speed: it behaves as the machine does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from moeserve.cli.plan.cache_forecast import CacheForecast, CacheUse
from moeserve.cli.plan.rates import CpuRates, GpuRates
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.cli.plan.speed import CpuSpeed, HybridSpeed, Step
from moeserve.kv.layout import KvLayout
from moeserve.models.open import open_metadata
from moeserve.placement import Gpu, ModelSizes, PlacementOptions, Prefill, place
from moeserve.placement.expert_cache.replay import StepUse
from tests.support.models.model_header import qwen3moe, write_header
from tests.support.router.placement_world import model

RATES = CpuRates(read=50e9, dense_ops=1e12, expert_ops=1e12, op_s=1e-6, step_s=1e-4, row_s=1e-5)

BIG = qwen3moe(num_layers=4, context_length=4096, vocab_size=1000)


def sizes() -> ModelSizes:
    return model(layers=4, experts=128)


def test_routing_without_preference_follows_the_formula() -> None:
    routing = RoutingProbabilities(BIG)
    for tokens in (1, 2, 8, 64):
        assert routing.touched(0, tokens).sum() == pytest.approx(128 * (1 - (1 - 8 / 128) ** tokens))
    assert routing.share(0, range(32)) == pytest.approx(0.25)


def test_heat_tells_which_experts_are_touched() -> None:
    counts = np.ones((4, 128), int)
    counts[:, :8] = 10_000  # nearly every token asks for these eight
    counts[3] = 0  # a layer that nobody has used yet
    routing = RoutingProbabilities(BIG, counts.tolist())
    assert routing.touched(0, 16).sum() < 20
    assert routing.share(0, range(8)) > 0.9
    assert routing.touched(3, 1).sum() == pytest.approx(8)


def test_more_work_takes_longer_and_more_streams_are_more_efficient() -> None:
    speed = CpuSpeed(BIG, sizes(), RoutingProbabilities(BIG), RATES)
    steps = [Step(1, 1, 0), Step(1, 1, 4000), Step(4, 1, 4000), Step(16, 1, 4000), Step(1, 512, 0)]
    seconds = [speed.seconds(step) for step in steps]
    assert seconds == sorted(seconds)
    rates = [speed.decode(streams, 512) for streams in (1, 4, 16, 64)]
    assert rates == sorted(rates)
    assert speed.prefill(512, 512) > speed.prefill(4096, 512)


def test_one_stream_is_bound_by_reading() -> None:
    """Far from any overhead: what is read, over what the engine reaches of the bandwidth."""
    bare = CpuRates(read=10e9, dense_ops=1e15, expert_ops=1e15, op_s=0.0)
    model = sizes()
    read = model.head.cpu + sum(layer.dense.cpu + 8 * layer.expert.cpu for layer in model.layers)
    assert CpuSpeed(BIG, model, RoutingProbabilities(BIG), bare).decode(1, 0) == pytest.approx(
        0.85 * 10e9 / read, rel=0.01
    )


def test_a_layer_more_on_the_gpu_is_faster() -> None:
    model = sizes()

    def rates(layers: int) -> tuple[float, float]:
        options = PlacementOptions(n_gpu_layers=layers, num_gpu_experts=0)
        placement = place(model, options, Gpu(64 << 30, 0))
        speed = HybridSpeed(BIG, model, RoutingProbabilities(BIG), placement, RATES, GpuRates())
        return speed.decode(1, 4000), speed.prefill(2048, 2048)

    decode, prefill = zip(*(rates(layers) for layers in (1, 2, 3, 4)), strict=True)
    assert list(decode) == sorted(decode)
    assert list(prefill) == sorted(prefill)


def test_large_steps_unpack_weights_and_are_faster(tmp_path: Path) -> None:
    """From 192 routes an expert on: 4,096 rows here. On an H200, 48 layers of this shape read 37,594 tokens a second
    in a step of 8,192, and a prompt of 32,000 in 1.58 s (docs/results/planner.md)."""
    path = tmp_path / "48.gguf"
    shape = qwen3moe(num_layers=48, vocab_size=1000)
    write_header(path, shape)
    files = ModelSizes.of(open_metadata(path).tensors, KvLayout(shape))
    placement = place(files, PlacementOptions(), Gpu(130 << 30, 2 << 30))
    rates = GpuRates(read=4.2e12, ops=790e12)
    speed = HybridSpeed(shape, files, RoutingProbabilities(shape), placement, RATES, rates)
    assert speed.prefill(8192, 8192) == pytest.approx(37_594, rel=0.15)
    assert 32_000 / speed.prefill(32_000, 8192) == pytest.approx(1.58, rel=0.15)
    assert speed.prefill(4096, 8192) > 1.4 * speed.prefill(1024, 8192)
    kept = place(files, PlacementOptions(unpacked_experts=60 << 30), Gpu(130 << 30, 2 << 30))
    faster = HybridSpeed(shape, files, RoutingProbabilities(shape), kept, RATES, rates)
    assert 1.1 < faster.prefill(8192, 8192) / speed.prefill(8192, 8192) < 1.25
    assert faster.prefill(1024, 8192) > speed.prefill(1024, 8192)
    assert faster.prefill(512, 8192) == speed.prefill(512, 8192)


def test_more_experts_on_the_gpu_are_faster_and_heat_makes_the_difference() -> None:
    model, room = sizes(), Gpu(64 << 30, 0)
    counts = [list(range(128, 0, -1))] * 4

    def decode(count: int, heat: list[list[int]] | None) -> float:
        placement = place(model, PlacementOptions(num_gpu_experts=count, counts=heat), room)
        speed = HybridSpeed(BIG, model, RoutingProbabilities(BIG, counts), placement, RATES, GpuRates())
        return speed.decode(1, 512)

    rates = [decode(count, counts) for count in (0, 32, 64, 96, 128)]
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]
    coldest = [list(range(128))] * 4
    assert decode(32, counts) > decode(32, coldest)


def test_prompts_are_shared_between_both_where_that_is_faster() -> None:
    """Few tokens are the CPU's, many are streamed whole; between, neither alone is as fast."""
    model, room = sizes(), Gpu(64 << 30, 0)

    def seconds(tokens: int, prefill: Prefill) -> float:
        placement = place(model, PlacementOptions(num_gpu_experts=0), room)
        layers = tuple(dataclasses.replace(layer, prefill=prefill) for layer in placement.layers)
        placement = dataclasses.replace(placement, layers=layers)
        return tokens / HybridSpeed(
            BIG, model, RoutingProbabilities(BIG), placement, RATES, GpuRates()
        ).prefill(tokens, 4096)

    on_cpu, streamed, best = ({n: seconds(n, way) for n in (8, 256, 4096)} for way in ("cpu", "cuda", "auto"))
    assert on_cpu[8] < streamed[8]
    assert best[8] <= on_cpu[8]
    assert on_cpu[4096] > streamed[4096]
    assert best[4096] <= streamed[4096]
    assert best[256] < 0.9 * min(on_cpu[256], streamed[256])


def steps_of(missed: list[int], promoted: int = 0, *, fetches: bool = False) -> CacheUse:
    """Returns the use of four layers by one step for each entry of `missed`: each layer uses eight experts, misses the
    entry's number of them, and promotes or fetches `promoted` of 1 MB each."""
    steps = [StepUse(np.full(4, 8), np.full(4, n), np.full(4, promoted)) for n in missed]
    return CacheUse(steps, np.full(4, 1_000_000), fetches)


def cached_speed(settled: CacheUse, at_first: CacheUse | None = None, rates: CpuRates = RATES) -> HybridSpeed:
    model = sizes()
    placement = place(model, PlacementOptions(num_gpu_experts=64), Gpu(64 << 30, 0)).with_cache(model)
    cache = CacheForecast(is_assumed=False, settled={1: settled}, at_first={1: at_first or settled})
    return HybridSpeed(BIG, model, RoutingProbabilities(BIG), placement, rates, GpuRates(), cache=cache)


def test_hits_of_the_cache_spare_the_pool_its_reads() -> None:
    """A layer waits for the slower side in each step, and a step cannot be shorter than its promotions take."""
    rates = [cached_speed(steps_of([misses])).decode(1, 512) for misses in (8, 4, 2, 1, 0)]
    assert rates == sorted(rates)
    assert cached_speed(steps_of([0], promoted=6250)).decode(1, 512) < 1.0  # 25 GB a step


def test_the_mean_is_of_steps_not_of_rates() -> None:
    """Half of the steps without a miss, half with eight a layer: as long as one of each, one after the other."""
    none, all_of_them, both = (cached_speed(steps_of(n)).decode(1, 512) for n in ([0], [8], [0, 8]))
    assert 2 / both == pytest.approx(1 / none + 1 / all_of_them)


def test_a_promotion_takes_a_step_as_long_as_reading_it() -> None:
    """Also where PCIe has time for it beside the step."""
    rates = [
        cached_speed(steps_of([8], promoted), rates=dataclasses.replace(RATES, read=1e9)).decode(1, 512)
        for promoted in (0, 3)
    ]
    assert 1 / rates[1] - 1 / rates[0] == pytest.approx(4 * 3 * 1e6 / 1e9)


def test_a_fetch_reads_an_expert_once() -> None:
    """Within the misses of a step, and a step cannot be shorter than its copies take."""
    slow = dataclasses.replace(RATES, read=1e9)
    fetched, kept, promoted = (
        cached_speed(steps_of([8], count, fetches=fetches), rates=slow).decode(1, 512)
        for count, fetches in ((3, True), (0, True), (3, False))
    )
    assert fetched == pytest.approx(kept)
    assert fetched > 1.2 * promoted
    assert cached_speed(steps_of([8], 6250, fetches=True)).decode(1, 512) < 1.0  # 25 GB a step


def test_a_text_begins_with_the_experts_of_another() -> None:
    speed = cached_speed(steps_of([1]), at_first=steps_of([6]))
    assert speed.decode(1, 512, at_first=True) == cached_speed(steps_of([6])).decode(1, 512)
    assert speed.decode(1, 512) == cached_speed(steps_of([1])).decode(1, 512)

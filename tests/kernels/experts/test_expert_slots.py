"""Experts that move between two steps: whatever the maps say during a step is true, to the byte, until it ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.planes import dequantize
from moeserve.models.loading.expert_maps import GPU, RAM
from moeserve.models.loading.expert_stream import ExpertStream
from moeserve.worker.engines.gpu.expert_exchange import QUIET
from tests.kernels.experts.slots_world import EXPERTS, FLOATS, PINNED, Q8, World
from tests.support.worker.random_promotions import RandomPolicy


@pytest.mark.parametrize(
    ("kinds", "steps", "nodes", "has_biases"),
    [
        pytest.param(FLOATS, 40, 1, False, marks=pytest.mark.slow),
        (Q8, 3, 1, False),
        (FLOATS, 3, 2, True),
        (Q8, 3, 3, True),
    ],
    ids=["floats", "quantised", "floats on two nodes with biases", "quantised on three with biases"],
)
def test_random_promotions_in_every_step(
    kinds: tuple[Type, Type, Type], steps: int, nodes: int, has_biases: bool
) -> None:
    """Whatever moves, a step finds whole experts: before its copies are launched, and behind them."""
    world = World(kinds, nodes, has_biases=has_biases)
    world.check()
    cache = world.cache()
    cache.policy = RandomPolicy(world.maps.on_gpu, world.movable)
    seen = set()
    for _ in range(steps):
        cache.before_step(streams=False)
        world.check()
        cache.after_launch()
        world.check()
        seen.add(world.maps.host.tobytes())
    assert len(seen) > min(6, steps // 2)
    assert cache.take_counts().promotions >= 2 * (steps // 2 - 1)
    assert world.maps.host[GPU, 2, PINNED] == 1


def test_a_slot_that_is_half_written_would_be_seen() -> None:
    """The check of the test above, shown a slot that stayed in the maps while it was filled."""
    world = World(FLOATS)
    world.slots.free()
    place, slot = int(world.maps.places[0, 4]), int(world.maps.host[GPU, 0, 0])
    world.slots.fill(np.array([[0, 4, place, slot]]))
    assert world.slots.filled(wait=True)
    with pytest.raises(AssertionError):
        world.check()


def test_the_text_decides() -> None:
    """Experts that steps miss come, one step later; the pinned one stays; hits and misses are counted by expert."""
    world = World(FLOATS)
    cache = world.cache()
    for step in range(6):
        cache.before_step(streams=False)
        world.check()
        world.use(0, 2, 3)
        world.use(1, 0)
        world.use(2, 4, PINNED)
        cache.after_launch()
        if step == 2:
            first = cache.take_counts()
    assert np.flatnonzero(world.maps.on_gpu[0]).tolist() == [2, 3]
    assert np.flatnonzero(world.maps.on_gpu[2]).tolist() == [4, PINNED]
    assert first.promotions == 3
    assert first.bytes == 3 * world.slots.bytes_of(0)
    assert (first.hits, first.misses) == (2, 6)  # of two steps; the pinned expert is the hit
    cache.before_step(streams=False)
    later = cache.take_counts()
    assert (later.hits, later.misses, later.promotions) == (16, 0, 0)


def test_a_step_is_waited_for_as_long_as_experts_come() -> None:
    """Then a miss is known at once. Where nothing pays, the next step is launched behind it without a look."""
    world = World(FLOATS)
    cache = world.cache()
    waits: list[int] = []

    def step(number: int, *experts: int, streams: bool = False) -> None:
        cache.before_step(streams=streams, until_ended=lambda: waits.append(number))
        world.check()
        world.use(0, *experts)
        cache.after_launch()

    for number in range(QUIET + 4):
        step(number, 2, 3)  # they come behind the first step, and there is nothing else to come
    assert waits == list(range(waits[-1] + 1))
    assert QUIET < len(waits) < QUIET + 4
    step(100, 2, streams=True)
    assert waits[-1] == 100
    for number in range(200, 240):
        step(number, 4, 5)  # until their scores are higher
    assert 200 in waits  # what the prompt has used is waited for
    again = [number for number in waits if number > 200]
    assert 201 < again[0] < again[-1] < 239
    assert again == list(range(again[0], again[-1] + 1))


def test_a_streamed_prompt_takes_what_the_pool_has() -> None:
    """Promotions end before it; what it streams and what it leaves are the pool's experts, each once."""
    world = World(FLOATS)
    cache = world.cache()
    stream = ExpertStream(world.ram.layers, world.panels, world.device, world.maps)
    cache.before_step(streams=False)
    world.use(0, 2, 4)
    world.use(2, 3)
    cache.after_launch()
    cache.before_step(streams=False)  # their slots are free
    cache.after_launch()
    cache.before_step(streams=True)
    world.check()
    assert world.maps.on_gpu.sum(axis=1).tolist() == [2, 0, 2]
    for counts in ((4, 6, 4), (2, 3, 0)):
        stream.begin(counts)
        for layer, count in enumerate(counts):
            streamed, left = stream.expert_map(layer).tolist(), stream.left(layer).tolist()
            places = world.maps.host[RAM, layer]
            for expert in range(EXPERTS):
                assert (streamed[expert] >= 0) + (left[expert] >= 0) == (places[expert] >= 0)
                assert left[expert] in (-1, places[expert])
            assert sum(s >= 0 for s in streamed) == count
            if not count:
                continue
            found = stream.take(layer)
            for m, planes in enumerate((found.gate, found.up, found.down)):
                for expert, at in enumerate(streamed):
                    if at >= 0:
                        assert torch.equal(dequantize(planes, at).cpu(), world.values[layer][m][expert])

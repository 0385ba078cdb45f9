"""Missed experts fetched within a step: the choice, to the bit, and what lies in the slots."""

from __future__ import annotations

from tests.kernels.triton_device import DEVICE, ints  # isort: skip  (first: it sets up the interpreter)
import threading
import time

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.handoff import reference
from moeserve.kernels.handoff.fetch import FIRST_SHARE
from moeserve.kernels.handoff.triton import CHANGE, LEAST, MOST, ONE, poll_kernel
from moeserve.kernels.launch import pdl
from moeserve.models.loading.expert_fetch import ExpertFetch
from moeserve.models.loading.expert_maps import GPU, RAM
from moeserve.placement.expert_cache.fetching import AT_ONCE, REPLAYED_SHARE, replay_fetches
from moeserve.placement.expert_cache.generate import LOCAL, generate
from moeserve.placement.expert_cache.policy import DECAY
from moeserve.placement.expert_cache.replay import Steps
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from tests.kernels.experts.slots_world import EXPERTS, FLOATS, PINNED, World
from tests.support.worker.random_promotions import RandomPolicy

KINDS = (Type.Q8_0, Type.Q8_0, Type.Q4_0)
TOP_K, WIDER = 2, 3
ROWS = range(2, 17)
CACHED = (0, 2)  # layers
IN_RAM = 4  # an expert of layer 0 that may not move either


def fetch_of(world: World) -> ExpertFetch:
    fetch = world.slots.fetch(np.where(world.movable, world.maps.places, np.int32(-1)), DECAY, ROWS, AT_ONCE)
    assert fetch is not None
    fetch.start()
    return fetch


def routes(rng: np.random.Generator, rows: int) -> torch.Tensor:
    """int32 [rows, TOP_K], columns of a wider tensor; the last row is padding."""
    ids = np.full((rows, WIDER), -1, np.int32)
    for row in ids[:-1]:
        row[:TOP_K] = rng.choice(EXPERTS, TOP_K, replace=False)
    return ints(ids)[:, :TOP_K]


@pytest.mark.parametrize(
    ("rows", "share", "nodes", "has_biases"),
    [
        (2, MOST.value, 1, False),
        (3, FIRST_SHARE, 1, False),
        (2, MOST.value, 2, False),
        (3, MOST.value, 3, True),
    ],
)
def test_the_choice_and_what_it_leaves(rows: int, share: int, nodes: int, has_biases: bool) -> None:
    """Each route has the slot of its expert or none, the experts with the highest scores come, and slots are whole."""
    world, rng = World(KINDS, nodes, has_biases=has_biases), np.random.default_rng(rows)
    world.movable[0, IN_RAM] = False
    fetch, slot_map = fetch_of(world), world.maps.slots
    fetch.balance(0)[0][0] = share
    places = torch.from_numpy(np.where(world.movable, world.maps.places, -1))
    scores = torch.zeros(3, EXPERTS)
    fetched = 0
    for _ in range(12):
        for layer in CACHED:
            ids = routes(rng, rows)
            local = torch.full((rows, WIDER), -1, dtype=torch.int32, device=DEVICE)[:, :TOP_K]
            local[ids >= 0] = slot_map[layer][ids[ids >= 0].long()]
            expected, scores[layer], come = reference.choose_fetched(
                ids.cpu(),
                slot_map[layer].cpu(),
                places[layer],
                scores[layer],
                share / ONE.value,
                16,
                DECAY,
            )
            fetch.choose(layer, ids, local)
            fetch.copy(layer)
            assert torch.equal(slot_map[layer].cpu(), expected)
            assert torch.equal(local[ids >= 0], slot_map[layer][ids[ids >= 0].long()])
            assert bool((local[ids < 0] == -1).all())
            assert fetch.totals[layer, 0] == len(come)
            fetched += len(come)
            world.check()
    assert fetched > 3
    assert int(fetch.totals[:, 1].sum()) == fetched
    assert world.maps.slots[2, PINNED] == 1  # it may not move
    assert world.maps.slots[0, IN_RAM] == -1


def test_a_replay_fetches_the_same() -> None:
    trace = generate(LOCAL, "", tokens=120, layers=2, experts=32, top_k=4, seed=1)
    cached, movable = np.zeros((2, 32), np.bool_), np.ones((2, 32), np.bool_)
    cached[:, :12] = True
    movable[0, 5], movable[1] = False, False
    uses = replay_fetches(steps := Steps(trace, 3), cached, movable)
    slots = torch.from_numpy(np.where(cached, np.arange(32), -1))
    places, scores = torch.from_numpy(np.where(movable, 0, -1)), torch.zeros(2, 32)
    for step, use in enumerate(uses):
        used = steps.used(step)
        for layer in range(2):
            ids = torch.from_numpy(np.flatnonzero(used[layer]))
            missed = int((slots[layer][ids] < 0).sum())
            slots[layer], scores[layer], come = reference.choose_fetched(
                ids, slots[layer], places[layer], scores[layer], REPLAYED_SHARE, AT_ONCE, DECAY
            )
            assert (use.used[layer], use.missed[layer], use.promoted[layer]) == (len(ids), missed, len(come))
    assert sum(use.promoted[0] for use in uses) > 30
    assert not any(use.promoted[1] for use in uses)


def test_nothing_is_fetched_before_the_start() -> None:
    world = World(KINDS)
    fetch = world.slots.fetch(world.maps.places, DECAY, ROWS, AT_ONCE)
    assert fetch is not None
    before = world.maps.slots.clone()
    ids = ints([[2, 3], [4, 5]])
    fetch.choose(0, ids, torch.full_like(ids, -1))
    fetch.copy(0)
    assert torch.equal(world.maps.slots, before)
    assert int(fetch.totals.sum()) == 0


def test_floats_are_promoted_only() -> None:
    assert World(FLOATS).slots.fetch(np.zeros((3, EXPERTS), np.int32), DECAY, ROWS, AT_ONCE) is None


def fetching_cache(world: World) -> tuple[ExpertFetch, ExpertCache]:
    fetch, cache = fetch_of(world), world.cache()
    return fetch, ExpertCache(
        world.maps, world.slots, world.movable, world.counts, cache._pool_reads, fetch=fetch
    )  # fmt: skip


def test_the_host_takes_the_map_over() -> None:
    """Steps that fetch follow one another without a wait. Before one that does not, the host waits, and its map, its
    policy and its counts are those of the device."""
    world = World(KINDS)
    fetch, cache = fetching_cache(world)
    cache.policy = RandomPolicy(world.maps.on_gpu, world.movable)
    waits: list[int] = []

    def step(number: int, rows: int) -> None:
        cache.before_step(streams=False, rows=rows, until_ended=lambda: waits.append(number))
        world.check()
        for layer, experts in ((0, (number % 3, 3, 4, 5)), (2, (0, (number + 1) % 3, 3, 4))):
            ids = ints(experts).view(2, 2)
            if rows > 1:
                fetch.choose(layer, ids, world.maps.slots[layer][ids.long()])
                fetch.copy(layer)
            world.use(layer, *experts)
        cache.after_launch()

    cache.before_step(streams=False, rows=2)  # the first step, which fetches nothing
    cache.after_launch()
    waits.clear()
    for number in range(4):
        step(number, rows=2)
    assert waits == []
    device = world.maps.slots.cpu().numpy()
    assert not np.array_equal(world.maps.host[GPU], device)
    cache.before_step(streams=True, until_ended=lambda: waits.append(4))
    assert waits == [4]
    assert np.array_equal(world.maps.host[GPU], device)
    assert np.array_equal(world.maps.host[RAM] >= 0, (device < 0) & (world.maps.places >= 0))
    fetched = int(fetch.totals[:, 1].sum())
    assert fetched >= 3
    counts = cache.totals
    assert (counts.promotions, counts.bytes) == (fetched, fetched * world.slots.bytes_of(0))
    assert counts.misses == int(world.reads.sum()) + fetched
    cache.after_launch()
    for number in (5, 6, 7, 8):
        step(number, rows=2 if number == 7 else 1)  # promotions come before and after


def test_steps_begin_to_fetch_with_the_scores_of_all_steps() -> None:
    """Steps that fetch nothing, and streamed prompts, count; dummy steps do not."""
    world = World(KINDS)
    fetch, cache = fetching_cache(world)
    waits: list[int] = []

    def step(number: int, *experts: int, rows: int = 1, streams: bool = False) -> None:
        cache.before_step(streams=streams, rows=rows, until_ended=lambda: waits.append(number))
        world.use(0, *experts)
        cache.after_launch()

    def scores() -> list[float]:
        return [round(score, 3) for score in fetch.scores[0].tolist()]

    step(0, 0, 1)
    step(1, 2, 3)
    step(2, 3, 4, rows=2)
    assert scores() == [0.9, 0.9, 1, 1, 0, 0]  # before the step adds its own
    step(3, 5, rows=2)
    assert scores() == [0.9, 0.9, 1, 1, 0, 0]  # the device's own, from now on
    step(4, 0, 2, 4, streams=True)
    waits.clear()
    step(5, 1, rows=2)
    assert waits == [5]  # for the prompt's counts
    assert scores()[:5:2] == [
        round(0.9**4 + 1, 3),
        round(0.9**3 + 1, 3),
        round(0.9**2, 3),
    ]  # as many as slots
    world.counts.zero_()
    cache.forget_counts()
    step(6, 3, rows=2)
    assert scores() == [0.0] * EXPERTS


def test_a_step_that_was_not_launched_has_fetched_nothing() -> None:
    world = World(KINDS)
    _, cache = fetching_cache(world)
    cache.before_step(streams=False, rows=2)
    cache.after_launch()
    cache.before_step(streams=False, rows=2)  # its launch fails
    before = world.maps.host.copy()
    cache.before_step(streams=False)
    assert np.array_equal(world.maps.host, before)
    world.check()


def test_fetches_by_dummy_steps_are_not_counted() -> None:
    world = World(KINDS)
    fetch, cache = fetching_cache(world)
    cache.before_step(streams=False, rows=2)
    cache.after_launch()
    cache.before_step(streams=False, rows=2)
    ids = ints([[2, 3], [4, 5]])
    fetch.choose(0, ids, world.maps.slots[0][ids.long()])
    fetch.copy(0)
    cache.after_launch()
    assert int(fetch.totals[:, 1].sum()) > 0
    cache.forget_counts()
    assert np.array_equal(world.maps.host[GPU], world.maps.slots.cpu().numpy())
    for _ in range(2):
        cache.before_step(streams=False)
        cache.after_launch()
    assert cache.totals.promotions == 0


def poll(share: int, fetched: int, answered_after_s: float | None) -> int:
    """The share after a wait. answered_after_s: None: the answer is there."""
    answer = torch.zeros(4, dtype=torch.int32)
    answer = answer.pin_memory() if DEVICE == "cuda" else answer
    control, fill = ints([share, 16]), torch.ones(1, dtype=torch.int32)

    def respond() -> None:
        time.sleep(answered_after_s or 0.0)
        answer[:1] = fill

    thread = threading.Thread(target=respond)
    thread.start()
    if answered_after_s is None:
        thread.join()
    poll_kernel((1,), answer, ints([1]), control, ints([fetched, 0]), pdl(), num_warps=1, launch_pdl=pdl())
    found = int(control[0])
    thread.join()
    return found


def test_whoever_comes_first_gets_more() -> None:
    assert poll(FIRST_SHARE, 3, None) == FIRST_SHARE - CHANGE.value
    assert poll(FIRST_SHARE, 0, None) == FIRST_SHARE  # nothing was fetched, so the share is not to blame
    assert poll(FIRST_SHARE, 3, 0.5) == FIRST_SHARE + CHANGE.value
    assert poll(FIRST_SHARE, 0, 0.5) == FIRST_SHARE + CHANGE.value
    assert poll(LEAST.value, 1, None) == LEAST.value
    assert poll(MOST.value, 1, 0.5) == MOST.value

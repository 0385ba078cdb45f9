"""The policy in C++ decides as its specification does, to the bit."""

from __future__ import annotations

import time

import numpy as np
import pytest

from moeserve.kernels import _C
from moeserve.placement.expert_cache.generate import LOCAL, UNIFORM, ReuseDistances, generate
from moeserve.placement.expert_cache.policy import DECAY, PAYS, CachePolicy, Mask
from moeserve.placement.expert_cache.replay import Steps

LAYERS, EXPERTS, SLOTS = 12, 64, 24


def start() -> tuple[Mask, Mask]:
    """Who is cached, and who may move: not expert 3 of layer 0, nor anything in the last layer."""
    cached, movable = np.zeros((LAYERS, EXPERTS), np.bool_), np.ones((LAYERS, EXPERTS), np.bool_)
    cached[:, :SLOTS] = True
    movable[0, 3], movable[-1] = False, False
    return cached, movable


@pytest.mark.parametrize(
    ("distances", "streams", "most"), [(LOCAL, 1, 40), (LOCAL, 5, 7), (UNIFORM, 3, 40), (LOCAL, 20, 400)]
)
def test_the_same_decisions(distances: ReuseDistances, streams: int, most: int) -> None:
    trace = generate(
        distances, "", tokens=400 * streams, layers=LAYERS, experts=EXPERTS, top_k=4, seed=streams
    )
    steps = Steps(trace, streams)
    cached, movable = start()
    specified, found = CachePolicy(cached, movable), _C.ExpertCachePolicy(cached, movable, DECAY, PAYS)
    counts, moved, rng = np.zeros((LAYERS, EXPERTS), np.int64), 0, np.random.default_rng(streams)
    for step in range(steps.count):
        used = steps.used(step)
        counts += used * (1 + step % 3)
        used[-1] = False  # no expert of the layer may move
        assert found.observe(counts, streamed=False) == used.sum()
        specified.observe(used)
        pays = step % 97 != 0  # else as behind a prompt
        ready = None if step % 3 else rng.random(used.shape) < 0.7  # else some cannot be promoted now
        moves = specified.choose(used, most, pays=pays, ready=ready)
        assert [tuple(move) for move in found.choose(most, pays=pays, ready=ready).tolist()] == moves
        assert ready is None or all(ready[move.layer, move.incoming] for move in moves)
        moved += len(moves)
        specified.learn(used)
        found.learn()
    assert moved > 100
    assert np.array_equal(found.scores(), specified._scores)
    found.forget()
    again = _C.ExpertCachePolicy(specified.cached, movable, DECAY, PAYS)
    counts[:] = 0
    for step in range(100):
        counts += steps.used(step)
        moves = []
        for policy in (found, again):
            policy.observe(counts, streamed=False)
            moves.append(policy.choose(most, pays=True).tolist())
            policy.learn()
        assert moves[0] == moves[1]


def test_a_streamed_prompt_leaves_its_hottest() -> None:
    """As many of a layer as may move there and have slots."""
    cached, movable = start()
    policy = _C.ExpertCachePolicy(cached, movable, DECAY, PAYS)
    counts = np.arange(1, LAYERS * EXPERTS + 1).reshape(LAYERS, EXPERTS)  # the last ones are the hottest
    policy.observe(counts, streamed=True)
    moves = policy.choose(1 << 20, pays=False)
    for layer in range(LAYERS - 1):
        slots = SLOTS - (layer == 0)
        coming = moves[moves[:, 0] == layer, 1]
        assert sorted(coming.tolist()) == list(range(EXPERTS - slots, EXPERTS))
    assert not (moves[:, 0] == LAYERS - 1).any()


def test_shapes_are_checked() -> None:
    cached, movable = start()
    with pytest.raises(ValueError, match="different shapes"):
        _C.ExpertCachePolicy(cached, movable[:2].copy(), DECAY, PAYS)
    policy = _C.ExpertCachePolicy(cached, movable, DECAY, PAYS)
    with pytest.raises(ValueError, match="different shapes"):
        policy.observe(np.zeros((LAYERS, EXPERTS + 1), np.int64), streamed=False)


def test_nothing_used_moves_nothing() -> None:
    policy = _C.ExpertCachePolicy(*start(), DECAY, PAYS)
    policy.observe(np.zeros((LAYERS, EXPERTS), np.int64), streamed=False)
    assert policy.choose(10, pays=False).shape == (0, 3)


def test_a_step_costs_the_host_little() -> None:
    """48 x 128 experts: 20 us on an idle core; this bound allows for a busy machine."""
    trace = generate(LOCAL, "", tokens=64, layers=48, experts=128, top_k=8)
    cached = np.zeros((48, 128), np.bool_)
    cached[:, :64] = True
    policy = _C.ExpertCachePolicy(cached, np.ones_like(cached), DECAY, PAYS)
    counts, times = np.zeros((48, 128), np.int64), []
    for token in range(64):
        counts += trace.used(token)
        began = time.thread_time()
        policy.observe(counts, streamed=False)
        policy.choose(46, pays=True)
        times.append(time.thread_time() - began)
        policy.learn()
    print(f"HOST {1e6 * np.median(times):.0f} us")
    assert min(times) < 1e-3

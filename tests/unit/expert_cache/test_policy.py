"""The cache policy, what its exchanges are worth, and both on traces."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.placement.expert_cache.exchange_value import WATCHED, ExchangeValue, band_of
from moeserve.placement.expert_cache.generate import LOCAL, UNIFORM, generate
from moeserve.placement.expert_cache.policy import CachePolicy, Mask, Move
from moeserve.placement.expert_cache.replay import Steps, first, replay_cache
from moeserve.placement.expert_cache.routing_trace import RoutingTrace

MOST = 24


def mask(experts: int, *ids: int) -> Mask:
    """A mask of one layer's experts."""
    out = np.zeros((1, experts), np.bool_)
    out[0, list(ids)] = True
    return out


def test_the_least_recently_used_goes() -> None:
    policy = CachePolicy(mask(6, 0, 1, 2), np.ones((1, 6), np.bool_))
    for used in ((1,), (2,), (0,)):
        policy.observe(mask(6, *used))
    policy.observe(missed := mask(6, 5))
    assert policy.choose(missed, 4, pays=False) == [Move(0, incoming=5, outgoing=1)]
    assert np.flatnonzero(policy.cached[0]).tolist() == [0, 2, 5]


def test_a_frequent_expert_stays() -> None:
    """One that was used often is worth more than one that was used once, a little later."""
    policy = CachePolicy(mask(6, 0, 1), np.ones((1, 6), np.bool_))
    for used in ((0,), (0,), (0,), (1,)):
        policy.observe(mask(6, *used))
    policy.observe(missed := mask(6, 3))
    assert [move.outgoing for move in policy.choose(missed, 1, pays=False)] == [1]


def test_what_does_not_fit_the_budget_stays_out() -> None:
    """The greatest gains are first: expert 4 was used twice."""
    policy = CachePolicy(mask(6, 0, 1), np.ones((1, 6), np.bool_))
    policy.observe(mask(6, 4))
    policy.observe(missed := mask(6, 3, 4))
    assert [move.incoming for move in policy.choose(missed, 1, pays=False)] == [4]
    assert policy.choose(missed, 0, pays=False) == []


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Mask, Mask, list[Mask], int]:
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    some = st.lists(
        st.lists(st.booleans(), min_size=experts, max_size=experts), min_size=layers, max_size=layers
    ).map(np.array)
    return draw(some), draw(some), draw(st.lists(some, min_size=1, max_size=12)), draw(st.integers(0, 20))


@settings(deadline=None, max_examples=80)
@given(worlds())
def test_slots_are_exchanged_one_for_one(world: tuple[Mask, Mask, list[Mask], int]) -> None:
    """Each move brings what was missed and takes what was cached and is not in use; pinned ones never move."""
    cached, movable, steps, most = world
    policy = CachePolicy(cached, movable)
    for used in steps:
        policy.observe(used)
        before = policy.cached.copy()
        moves = policy.choose(used, most, pays=False)
        assert len(moves) <= most
        expected = before.copy()
        for layer, incoming, outgoing in moves:
            assert used[layer, incoming]
            assert not before[layer, incoming]
            assert before[layer, outgoing]
            assert not used[layer, outgoing]
            assert movable[layer, incoming]
            assert movable[layer, outgoing]
            expected[layer, incoming], expected[layer, outgoing] = True, False
        assert np.array_equal(policy.cached, expected)
        assert np.array_equal(policy.cached.sum(axis=1), cached.sum(axis=1))


def test_an_exchange_is_worth_what_it_spares() -> None:
    """Watched, not made: uses of the newcomers less those of the others, of all that are in their band."""
    value, band = ExchangeValue((1, 32)), band_of(np.full(16, 1.0, np.float32))
    came, went = np.arange(16), np.arange(16, 32)
    for step in range(8 * WATCHED):
        # The newcomers are used in three steps of four, half of the others in the fourth.
        value.observe(mask(32, *(came if step % 4 else went[:8])))
        value.watch(np.zeros(16, np.int64), came, went, band)
        if step < 4:
            assert value.expected()[band[0]] == 0.0  # too little was seen
    # Less two standard deviations: the square root of the reads seen.
    seen = 16 * 64 * (0.75 + 0.125)
    least = WATCHED * (0.75 - 0.125 - 2 * seen**0.5 / (16 * 64))
    assert abs(value.expected()[band[0]] - least) < 1.0


def hottest(trace: RoutingTrace, slots: int) -> Mask:
    """bool [layers, experts]: the `slots` most used experts of each layer."""
    layers = trace.ids.shape[1]
    chosen = np.zeros((layers, trace.experts), np.bool_)
    for layer in range(layers):
        counts = np.bincount(trace.ids[:, layer].ravel(), minlength=trace.experts)
        chosen[layer, np.argsort(-counts, kind="stable")[:slots]] = True
    return chosen


def test_a_local_text_hits_as_an_lru_does() -> None:
    """Half of the experts: published are 94% between those of 49 and of 81 of 128, where a static set has half."""
    trace = generate(LOCAL, "local", tokens=500, layers=8, experts=128, top_k=8)
    steps, start = Steps(trace, 1), first(trace, 64)
    static = replay_cache(steps, start, most=0)
    cache = replay_cache(steps, start, decay=0.9, most=MOST)
    assert 0.45 < static.hit_rate < 0.55
    assert cache.hit_rate > 0.88
    assert cache.hit_rate > replay_cache(steps, hottest(trace, 64), most=0).hit_rate + 0.1


def test_uniform_routing_promotes_nothing() -> None:
    for streams in (1, 8):
        trace = generate(UNIFORM, "uniform", tokens=150 * streams, layers=8, experts=128, top_k=8)
        steps, start = Steps(trace, streams), first(trace, 64)
        assert replay_cache(steps, start, decay=0.9, most=MOST).promotions < 0.1 * steps.count
        ever = replay_cache(steps, start, decay=0.9, most=MOST, adapts=False)
        assert ever.promotions > 10 * steps.count  # what it would have cost


def test_a_change_of_topic_is_soon_over() -> None:
    trace = generate(LOCAL, "local", tokens=600, layers=8, experts=128, top_k=8, topic_tokens=300)
    rates: list[float] = []
    replay_cache(Steps(trace, 1), first(trace, 64), decay=0.9, most=MOST, per_step=rates)
    before = np.mean(rates[200:300])
    assert np.mean(rates[300:310]) < 0.9 * before
    assert np.mean(rates[412:428]) > 0.9 * before


def test_a_text_that_repeats_itself_again_is_noticed() -> None:
    shape = {"layers": 8, "experts": 128, "top_k": 8}
    uniform = generate(UNIFORM, "uniform", tokens=600, **shape)
    local = generate(LOCAL, "local", tokens=600, **shape)
    policy = CachePolicy(first(local, 64), np.ones((8, 128), np.bool_))
    hits, moved = [], []
    for trace in (uniform, local):
        for token in range(600):
            used = trace.used(token)
            hits.append((used & policy.cached).sum() / used.sum())
            policy.observe(used)
            moved.append(len(policy.choose(used, MOST)))
            policy.learn(used)
    assert sum(moved[:600]) < 60
    assert np.mean(hits[632:664]) > 0.7  # within 32 tokens
    assert np.mean(hits[-200:]) > 0.88


def one_by_one(policy: CachePolicy, used: Mask, most: int) -> list[Move]:
    """The specification of `choose`: each layer's best newcomer for its worst expert, the next for the next; of all of
    them those of the greatest gains."""
    found = []
    for layer, scores in enumerate(policy._scores):
        coming = np.flatnonzero(used[layer] & ~policy.cached[layer] & policy._movable[layer])
        going = np.flatnonzero(policy.cached[layer] & policy._movable[layer] & ~used[layer])
        best = coming[np.lexsort((coming, -scores[coming]))]
        worst = going[np.lexsort((going, scores[going]))]
        for new, old in zip(best, worst, strict=False):
            if scores[new] > scores[old]:
                found.append((scores[old] - scores[new], layer, Move(layer, int(new), int(old))))
    chosen = sorted(found, key=lambda each: each[0])[:most]
    return [move for _, _, move in sorted(chosen, key=lambda each: each[1])]


@settings(deadline=None, max_examples=80)
@given(worlds())
def test_all_moves_at_once_are_those_made_one_by_one(world: tuple[Mask, Mask, list[Mask], int]) -> None:
    cached, movable, steps, most = world
    policy = CachePolicy(cached, movable)
    for used in steps:
        policy.observe(used)
        expected = one_by_one(policy, used, most)
        assert policy.choose(used, most, pays=False) == expected

"""Random lives of a router whose windowed layers have a KV pool of their own. The worker asserts that each row finds
the KV of all tokens before it in one pool, and of its window in the other."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.snapshot_points import SnapshotSpacing
from moeserve.router.core.memory.window_memory import least_slots
from tests.support.router.router_lives import EVENT, Event, crowded_events, live
from tests.support.router.router_world import World


def limits_of(window: int, spare: int, **others: Any) -> Limits:
    """With as many window slots as running requests may need, and `spare`."""
    running = min(others["max_num_seqs"], others["max_num_batched_tokens"])
    spare += running * 2 * others.get("max_drafts", 0)
    slots = least_slots(window, running, others["max_num_batched_tokens"]) + spare
    return Limits(num_window_slots=slots, window=window, **others)


LIMITS = st.builds(
    limits_of,
    st.integers(2, 12),
    st.integers(0, 30),
    num_kv_slots=st.integers(12, 48),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(12, 40),
    max_num_batched_tokens=st.integers(1, 12),
    max_num_queued_reqs=st.sampled_from([2, 100]),
    max_itl_ms=st.sampled_from([None, 5.0]),
    reuse_prefixes=st.sampled_from([True, True, True, False]),
    isolate_tenants=st.booleans(),
    snapshot_spacing=st.builds(
        SnapshotSpacing, tail=st.integers(0, 3), least=st.integers(1, 4), first=st.integers(2, 6)
    ),
    event_block_size=st.sampled_from([None, 2, 3]),
    max_drafts=st.sampled_from([0, 1, 3, 6]),
)


@settings(max_examples=100, deadline=None)
@given(limits=LIMITS, events=st.lists(EVENT, min_size=10, max_size=60), dies=st.booleans())
def test_random_lives(limits: Limits, events: list[Event], dies: bool) -> None:
    live(limits, events, dies)


def crowded_life(seed: int, loses: float = 0.0) -> World:
    rng = random.Random(seed)
    limits = limits_of(
        rng.randint(2, 12),
        rng.randint(0, 60),
        num_kv_slots=rng.randint(24, 64),
        max_num_seqs=rng.randint(1, 8),
        max_model_len=24 + rng.randint(0, 16),
        max_num_batched_tokens=rng.randint(1, 16),
        max_num_queued_reqs=100,
        max_itl_ms=rng.choice([None, 10.0]),
        reuse_prefixes=rng.random() < 0.9,
        isolate_tenants=rng.random() < 0.3,
        snapshot_spacing=SnapshotSpacing(rng.randint(0, 3), rng.randint(1, 4), rng.randint(2, 6)),
        event_block_size=rng.choice([None, 3]),
    )
    tenants = rng.choice([[""], ["a", "b"], ["greedy", "greedy", "greedy", "light", "other"]])
    try:
        return live(limits, crowded_events(rng, 100, tenants, loses), dies=seed % 16 == 0, check_every=4)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 500), marks=pytest.mark.slow)], ids=repr)
def test_crowded_lives(seeds: range) -> None:
    reports = [crowded_life(seed, loses=0.3 * (seed % 5 == 0)).scheduler.load_report() for seed in seeds]
    # What the lives are for does happen in them.
    assert sum(report.preemptions > 0 for report in reports) > 0.1 * len(seeds)
    assert sum(report.cached_tokens > 0 for report in reports) > 0.5 * len(seeds)
    assert sum(report.window_evictions > 0 for report in reports) > 0.1 * len(seeds)
    assert sum(report.window_hits > 0 for report in reports) > 0.5 * len(seeds)

"""Random lives of a router: whatever comes, nothing leaks, nothing hangs, nobody is forgotten, and every answer is
the one that the request would get alone.

A sequence is one router's life: requests that share prefixes or do not, of several API keys and priorities,
in a pool that is always short, with steps of random length, aborts, stop strings, workers that are lost and
replaced, and sometimes the server's end.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.kv.slot_kinds import SPARE_SLOTS, kinds_of_blocks
from moeserve.messages.pages import TierCounts
from moeserve.messages.schema import RequestError
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.snapshot_points import SnapshotSpacing
from tests.support.router.router_lives import EVENT, Event, crowded_events, live
from tests.support.router.router_world import World
from tests.support.router.virtual_tiers import VirtualTiers

LIMITS = st.builds(
    Limits,
    num_kv_slots=st.integers(12, 48),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(12, 40),
    max_num_batched_tokens=st.integers(1, 12),
    max_num_queued_reqs=st.sampled_from([2, 100]),
    max_num_queued_tokens=st.sampled_from([30, 1000]),
    max_itl_ms=st.sampled_from([None, 5.0, 20.0]),
    prefill_share=st.sampled_from([0.1, 0.4, 0.9]),
    reuse_prefixes=st.sampled_from([True, True, False]),
    isolate_tenants=st.booleans(),
    num_experts=st.sampled_from([0, 8]),
    experts_per_token=st.just(2),
    num_state_slots=st.sampled_from([0, 0, 1, 3, 6, 12]),
    page_tokens=st.sampled_from([0, 1, 2, 4]),
    snapshot_spacing=st.builds(
        SnapshotSpacing, tail=st.integers(0, 3), least=st.integers(1, 4), first=st.integers(2, 6)
    ),
    event_block_size=st.sampled_from([None, 2, 3]),
    max_drafts=st.sampled_from([0, 1, 3, 6]),
)


@settings(max_examples=100, deadline=None)  # the slow tests have 100,000 lives
@given(limits=LIMITS, events=st.lists(EVENT, min_size=10, max_size=60), dies=st.booleans())
def test_random_lives(limits: Limits, events: list[Event], dies: bool) -> None:
    live(limits, events, dies)


def crowded_life(
    seed: int,
    loses: float = 0.0,
    *,
    recurrent: bool = False,
    tiers: VirtualTiers | None = None,
    max_drafts: int = 0,
    blocks: tuple[int, ...] = (),
) -> World:
    """blocks: the KV pool's slots are of kinds for blocks of these numbers of tokens."""
    rng = random.Random(seed)
    more: dict[str, Any] = recurrent_limits(random.Random(-seed)) if recurrent else {}
    if tiers is not None:
        more |= {"page_tokens": tiers.page_tokens, "tiers": tiers.tiers}
    limits = Limits(
        num_kv_slots=rng.randint(24, 64),
        max_num_seqs=rng.randint(1, 8),
        max_model_len=24 + rng.randint(0, 16),
        max_num_batched_tokens=rng.randint(1, 16),
        max_num_queued_reqs=100,
        max_itl_ms=rng.choice([None, 10.0]),
        prefill_share=rng.choice([0.1, 0.4, 0.9]),
        reuse_prefixes=rng.random() < 0.8,
        isolate_tenants=rng.random() < 0.3,
        num_experts=rng.choice([0, 16]),
        experts_per_token=2,
        event_block_size=rng.choice([None, 3]),
        max_drafts=max_drafts,
        **more,
    )
    spare = SPARE_SLOTS * limits.max_num_seqs
    limits = replace(limits, slot_kinds=tuple(kinds_of_blocks(blocks, limits.num_kv_slots, spare)))
    tenants = rng.choice([[""], ["a", "b"], ["greedy", "greedy", "greedy", "light", "other"]])
    try:
        return live(
            limits, crowded_events(rng, 100, tenants, loses), dies=seed % 16 == 0, check_every=8, tiers=tiers
        )
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


def recurrent_limits(rng: random.Random) -> dict[str, Any]:
    spacing = SnapshotSpacing(rng.randint(0, 3), rng.randint(1, 4), rng.randint(2, 6))
    return {"num_state_slots": rng.randint(1, 16), "snapshot_spacing": spacing}


def some_seeds(count: int) -> pytest.MarkDecorator:
    """The first `count` seeds in every run of the suite, the others with the slow tests: 20 s."""
    others = pytest.param(range(count, 500), marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [range(count), others], ids=repr)


CROWDED = some_seeds(20)
FAULTY = some_seeds(40)  # tiers that fail more or less often


@CROWDED
def test_crowded_lives(seeds: range) -> None:
    reports = [crowded_life(seed).scheduler.load_report() for seed in seeds]
    # What the lives are for does happen in them.
    assert sum(report.preemptions > 0 for report in reports) > 0.1 * len(seeds)
    assert sum(report.cached_tokens > 0 for report in reports) > 0.5 * len(seeds)
    assert sum(report.repeated_tokens > 0 for report in reports) > 0.05 * len(seeds)


@CROWDED
def test_crowded_lives_of_models_with_recurrent_state(seeds: range) -> None:
    """The worker asserts that each row continues from the state of exactly the tokens before it."""
    reports = [crowded_life(seed, recurrent=True).scheduler.load_report() for seed in seeds]
    assert sum(report.preemptions > 0 for report in reports) > 0.1 * len(seeds)
    assert sum(report.cached_tokens > 0 for report in reports) > 0.4 * len(seeds)
    assert sum(report.state_snapshot_evictions > 0 for report in reports) > 0.2 * len(seeds)
    assert sum(report.state_snapshot_hits > 0 for report in reports) > 0.4 * len(seeds)
    for seed in seeds[::5]:
        crowded_life(seed, loses=0.4, recurrent=True)


@CROWDED
def test_crowded_lives_with_drafts(seeds: range) -> None:
    """The worker asserts that each row has slots for all of its positions, and reads what is committed."""
    reports = []
    for seed in seeds:
        life = crowded_life(seed, 0.4 * (seed % 4 == 0), recurrent=seed % 2 == 0, max_drafts=1 + seed % 5)
        reports.append(life.scheduler.load_report())
    assert sum(report.preemptions > 0 for report in reports) > 0.1 * len(seeds)
    assert sum(report.cached_tokens > 0 for report in reports) > 0.4 * len(seeds)
    assert sum(report.accepted_draft_tokens > 10 for report in reports) > 0.5 * len(seeds)
    wrong = [report.draft_tokens - report.accepted_draft_tokens for report in reports]
    # Steps' random times say that they do not pay, and an account bounds them.
    assert sum(count > 5 for count in wrong) > 0.4 * len(seeds)


@CROWDED
def test_crowded_lives_with_slots_by_kind(seeds: range) -> None:
    """No slot of a kind is ever lacking for a running request; the world asserts that each is of its position's."""
    reports = []
    for seed in seeds:
        tiers = tiers_of(seed, 0.02) if seed % 3 == 0 else None
        life = crowded_life(
            seed,
            0.4 * (seed % 4 == 0),
            recurrent=seed % 5 > 0,
            max_drafts=seed % 3,
            tiers=tiers,
            blocks=(2, 8) if seed % 2 else (3, 4),
        )
        reports.append(life.scheduler.load_report())
    assert sum(report.preemptions > 0 for report in reports) > 0.1 * len(seeds)
    assert sum(report.cached_tokens > 0 for report in reports) > 0.4 * len(seeds)


def tiers_of(seed: int, faults: float) -> VirtualTiers:
    """A disk, RAM, or both."""
    ram_pages, has_disk = [(0, True), (100, False), (8, True), (100, True)][seed % 4]
    return VirtualTiers(
        seed % 3 + 1, seed, faults=faults, instant=False, ram_pages=ram_pages, has_disk=has_disk
    )


def tier_counts(world: World) -> list[TierCounts]:
    report = world.scheduler.load_report()
    return [report.ram, report.disk]


@FAULTY
def test_crowded_lives_with_tiers(seeds: range) -> None:
    """Their pages come late, fail and go; a router that comes after finds those that are left."""
    counts = []
    for number, seed in enumerate(seeds[::4]):
        tiers = tiers_of(number, faults=[0.0, 0.02, 0.2][number // 4 % 3])
        for life in (seed, seed + 1):
            tiers.connect(is_new=life % 3 > 0)
            world = crowded_life(life, loses=0.1 * (seed % 8 == 0), tiers=tiers)
            counts.append(tier_counts(world))
    some = len(counts)
    assert sum(sum(count.tokens for count in each) > 20 for each in counts) > 0.25 * some
    assert sum(sum(count.failed_pages for count in each) > 0 for each in counts) > 0.1 * some
    assert sum(sum(count.bytes_written for count in each) > 0 for each in counts) > 0.6 * some
    for tier in range(2):
        assert sum(each[tier].tokens > 0 for each in counts) > 0.1 * some


@FAULTY
def test_crowded_lives_of_recurrent_models_with_tiers(seeds: range) -> None:
    """The worker asserts that a state that was loaded is that of the tokens before each row."""
    counts = []
    for number, seed in enumerate(seeds[::8]):
        tiers = tiers_of(number, faults=[0.0, 0.02, 0.2][number // 4 % 3])
        for life in (seed, seed + 1):
            tiers.connect(is_new=life % 3 > 0)
            world = crowded_life(life, loses=0.1 * (seed % 16 == 0), recurrent=True, tiers=tiers)
            counts.append(tier_counts(world))
    assert sum(sum(count.tokens for count in each) > 0 for each in counts) >= 0.2 * len(counts)
    assert sum(sum(count.bytes_written for count in each) > 0 for each in counts) > 0.6 * len(counts)


@FAULTY
def test_crowded_lives_with_lost_workers(seeds: range) -> None:
    seeds = seeds[::2]
    worlds = [crowded_life(seed, loses=0.4) for seed in seeds]
    reports = [world.scheduler.load_report() for world in worlds]
    assert sum(report.continued > 3 for report in reports) > 0.25 * len(seeds)
    failed = [
        seen.final
        for world in worlds
        for seen in world.seen.values()
        if isinstance(seen.final, RequestError) and "times over this" in seen.final.message
    ]
    assert len(failed) < 0.5 * len(seeds)
    assert failed or len(seeds) < 100


@pytest.mark.parametrize("seed", [22376, 24161])
def test_keys_do_not_preempt_each_other_for_ever(seed: int) -> None:
    """Two prompts of two keys that do not fit together, without a prefix cache to keep what a preemption frees."""
    crowded_life(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(100))
def test_a_hundred_thousand_lives(block: int) -> None:
    for seed in range(10_000 + block * 1000, 10_000 + (block + 1) * 1000):
        crowded_life(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(100))
def test_a_hundred_thousand_lives_with_tiers(block: int) -> None:
    """Every second one of a recurrent model; five lives follow each other on the same tiers."""
    for seed in range(200_000 + block * 1000, 200_000 + (block + 1) * 1000, 5):
        tiers = tiers_of(seed // 10, faults=[0.0, 0.02, 0.2][seed // 5 % 3])
        for life in range(seed, seed + 5):
            tiers.connect(is_new=life % 3 > 0)
            crowded_life(life, loses=0.1 * (life % 4 == 0), recurrent=seed // 5 % 2 == 0, tiers=tiers)

"""Random lives of a router: whatever comes, nothing leaks, nothing hangs, nobody is forgotten, and every answer is
the one that the request would get alone.

A sequence is one router's life: requests that share prefixes or do not, of several API keys and priorities,
in a pool that is always short, with steps of random length, aborts, stop strings, workers that are lost and
replaced, and sometimes the server's end.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.messages.pages import TierCounts
from moeserve.messages.schema import DetokenizeEnd, GenerateRequest, RequestError, TokensItem
from moeserve.messages.steps import StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.snapshot_points import BorderSpacing
from tests.support.checking_worker import STOP_TOKEN, ints
from tests.support.router_world import Seen, World, request
from tests.support.virtual_tiers import VirtualTiers

Event: TypeAlias = tuple[Any, ...]  # its kind, then what the kind needs: see EVENT
Added: TypeAlias = dict[int, tuple[GenerateRequest, list[int]]]  # by id: the request, the worker's script

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
    border_spacing=st.builds(
        BorderSpacing, tail=st.integers(0, 3), least=st.integers(1, 4), first=st.integers(2, 6)
    ),
    event_block_size=st.sampled_from([None, 2, 3]),
    max_drafts=st.sampled_from([0, 1, 3, 6]),
)
TOKEN = st.sampled_from([7, 7, 7, 7, 7, STOP_TOKEN, -1])
ADD = st.tuples(
    st.just("add"),
    # The prompt: so many tokens of one of two stems that many share, then so many of its own.
    st.tuples(st.integers(0, 12), st.integers(0, 1), st.integers(0, 8)),
    st.integers(0, 16),  # max_tokens
    st.integers(-1, 1),  # priority
    st.integers(0, 3),  # min_tokens
    st.booleans(),  # prompt_logprobs
    st.lists(TOKEN, max_size=6),  # the first tokens; ordinary ones follow
    st.sampled_from(["", "", "a", "b", "c"]),  # API key
    st.sampled_from(["", "", "salt"]),
)
PICK = st.integers(0, 15)  # a request, seen or not
EVENT = st.one_of(
    ADD,
    ADD,
    st.tuples(st.just("plan")),
    st.tuples(st.just("result")),
    st.tuples(st.just("turn")),  # as the manager does it: every plan there is, then one result
    st.tuples(st.just("abort"), PICK),
    st.tuples(st.just("stop"), PICK, st.integers(0, 8)),
    st.tuples(st.just("lose")),
    st.tuples(st.just("back"), st.booleans()),
)


def message(id: int, event: Event) -> GenerateRequest:
    _, (shared, stem, own), max_tokens, priority, min_tokens, scored, _, key_name, salt = event
    tokens = [1000 * stem + i for i in range(shared)] + [100_000 + 100 * id + i for i in range(own)]
    return request(
        id,
        tokens,
        max_tokens,
        priority=priority,
        key_name=key_name,
        cache_salt=salt,
        min_tokens=min_tokens,
        prompt_logprobs=0 if scored else None,
    )


def apply(world: World, event: Event) -> None:
    match event:
        case ("plan",):
            world.plan()
        case ("result",):
            world.result()
        case ("turn",):
            while world.plan() is not None:
                pass
            world.result()
        case ("abort", id, *_):
            world.abort(id)
        case ("stop", id, num_tokens):
            world.stop_hit(id, num_tokens)
        case ("lose",) if not world.lost:
            world.lose_worker()
        case ("back", by_itself) if world.lost:
            world.find_worker(crashed_by_itself=by_itself)


def expected_tokens(message: GenerateRequest, script: list[int]) -> tuple[list[int], str]:
    """The client's tokens and the end, from the request and the worker's script alone."""
    tokens: list[int] = []
    for index in range(message.sampling.max_tokens):
        token = script[index] if index < len(script) else 100 + index
        if token < 0:
            return tokens, "error"
        if token == STOP_TOKEN and index >= message.sampling.min_tokens:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


def check_endings(world: World, added: Added, touched: set[int], died: bool) -> None:
    for id, (message, script) in added.items():
        seen = world.seen[id]
        tokens, reason = expected_tokens(message, script)
        assert seen.final is not None, f"request {id} was forgotten"
        if not seen.opened:
            assert isinstance(seen.final, RequestError)
            assert seen.final.status in (400, 503)
            assert seen.final.status == 400 or seen.final.retry_after is not None
            continue
        assert seen.tokens == tokens[: len(seen.tokens)]
        if isinstance(seen.final, DetokenizeEnd):
            assert id in touched
        elif isinstance(seen.final, RequestError):
            is_blamed = (
                "times over this" in seen.final.message and world.scheduler.load_report().engine_losses > 1
            )
            failed = seen.final.status == 500 and (reason == "error" or is_blamed)
            assert failed or (seen.final.status == 503 and died)
        elif id not in touched:
            check_complete(seen.final, seen, message, tokens, reason)


def check_complete(
    final: TokensItem, seen: Seen, message: GenerateRequest, tokens: list[int], reason: str
) -> None:
    assert seen.tokens == tokens
    assert final.finish_reason == reason
    assert final.stop_token == (STOP_TOKEN if reason == "stop" else None)
    assert final.usage is not None
    assert final.usage.completion_tokens == len(tokens) + (reason == "stop")
    assert 0 <= final.usage.cached_tokens < final.usage.prompt_tokens
    if message.sampling.prompt_logprobs is not None:
        assert seen.prompt_logprobs == ints(message.token_ids)[1:]
        assert final.usage.cached_tokens == 0


def live(
    limits: Limits,
    events: Iterable[Event],
    dies: bool,
    check_every: int = 1,
    tiers: VirtualTiers | None = None,
) -> World:
    """One life of a router, checked after every event (the costly checks after every so many) and at its end."""
    times = random.Random(limits.num_kv_slots)

    def step_ms(result: StepResult) -> float:
        return times.choice([0.0, 1.0, 5.0, 150.0]) * (1 + len(result.sampled))

    world = World(limits, step_ms)
    if tiers is not None:
        world.worker.tiers = tiers
    added: Added = {}
    touched: set[int] = set()
    for number, event in enumerate(events):
        if event[0] == "add":
            id = len(added)
            added[id] = (message(id, event), event[6])
            world.add(*added[id])
        elif event[0] in ("abort", "stop"):
            touched.add(event[1])
        apply(world, event)
        world.check(slots=number % check_every == 0)
    if world.lost:
        world.find_worker()
    if dies:
        world.die()
        world.check()
        assert world.plan() is None
    world.run()
    check_endings(world, added, touched, dies)
    world.check_all_free()
    return world


@settings(max_examples=100, deadline=None)  # the slow tests have 100,000 lives
@given(limits=LIMITS, events=st.lists(EVENT, min_size=10, max_size=60), dies=st.booleans())
def test_random_lives(limits: Limits, events: list[Event], dies: bool) -> None:
    live(limits, events, dies)


def crowded_events(rng: random.Random, count: int, tenants: list[str], loses: float = 0.0) -> Iterator[Event]:
    """Mostly arrivals and steps, so that the pool is always short: deeper than hypothesis likes to go."""
    kinds, weights = ["add", "turn", "result", "plan", "abort", "stop"], [3, 5, 1, 1, 0.3, 0.3]
    kinds, weights = [*kinds, "lose", "back"], [*weights, loses, 3 * loses]
    for kind in rng.choices(kinds, weights, k=count):
        if kind == "add":
            script = [rng.choice([7, 7, 7, 7, 7, 7, STOP_TOKEN, -1]) for _ in range(rng.randrange(12))]
            prompt = rng.randint(0, 12), rng.randint(0, 1), rng.randint(0, 8)
            sampling = rng.randint(0, 16), rng.randint(-1, 1), rng.randint(0, 3), rng.random() < 0.2
            yield ("add", prompt, *sampling, script, rng.choice(tenants), rng.choice(["", "", "salt"]))
        elif kind in ("abort", "stop"):
            yield (kind, rng.randrange(40), rng.randrange(8))
        elif kind == "back":
            yield (kind, rng.random() < 0.5)
        else:
            yield (kind,)


def crowded_life(
    seed: int,
    loses: float = 0.0,
    *,
    recurrent: bool = False,
    tiers: VirtualTiers | None = None,
    max_drafts: int = 0,
) -> World:
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
    tenants = rng.choice([[""], ["a", "b"], ["greedy", "greedy", "greedy", "light", "other"]])
    try:
        return live(
            limits, crowded_events(rng, 100, tenants, loses), dies=seed % 16 == 0, check_every=8, tiers=tiers
        )
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


def recurrent_limits(rng: random.Random) -> dict[str, Any]:
    spacing = BorderSpacing(rng.randint(0, 3), rng.randint(1, 4), rng.randint(2, 6))
    return {"num_state_slots": rng.randint(1, 16), "border_spacing": spacing}


# A few in every run of the suite, the others with the slow tests: 20 s.
CROWDED = pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 500), marks=pytest.mark.slow)], ids=repr
)


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
    assert sum(report.draft_tokens - report.accepted_draft_tokens > 10 for report in reports) > 0.5 * len(
        seeds
    )


def tiers_of(seed: int, faults: float) -> VirtualTiers:
    """A disk, RAM, or both."""
    ram_pages, has_disk = [(0, True), (100, False), (8, True), (100, True)][seed % 4]
    return VirtualTiers(
        seed % 3 + 1, seed, faults=faults, instant=False, ram_pages=ram_pages, has_disk=has_disk
    )


def tier_counts(world: World) -> list[TierCounts]:
    report = world.scheduler.load_report()
    return [report.ram, report.disk]


@CROWDED
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


@CROWDED
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


@CROWDED
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

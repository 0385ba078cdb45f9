"""Drafts never make answers slower by more than 2%, in time that is computed: wrong drafts, and whatever steps cost."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import pytest

from moeserve.messages.steps import StepPlan, StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.policy.draft_account import (
    FIRST_TOKENS,
    MOST_STEPS,
    SHARE,
    DraftAccount,
    KeepAccount,
)
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.router.core.policy.step_cost import StepCost, StepShape
from moeserve.router.core.request import DraftRecord
from tests.support.router.router_world import World, request
from tests.support.router.step_durations import both, computes, waits_for_weights

ANSWER = 400


def half(rows: int) -> float:
    """As with two cores, where a row costs half of a token."""
    return 50.0 + 50.0 * rows


def duration(cost: Callable[[int], float], streams: int, right: float, max_drafts: int) -> float:
    """Milliseconds of all steps of `streams` answers at once, the first of this server."""
    total = 0.0

    def step_ms(result: StepResult) -> float:
        nonlocal total
        ms = cost(sum(1 + (one.accepted.drafted if one.accepted else 0) for one in result.sampled))
        total += ms
        return ms

    world = World(Limits(100_000, 64, 4000, 512, 200, max_drafts=max_drafts), step_ms)
    world.worker.right_drafts = right
    for id in range(streams):
        world.add(request(id, 20, ANSWER))
    world.run()
    return total


@functools.cache
def without_drafts(cost: Callable[[int], float], streams: int) -> float:
    return duration(cost, streams, 0.0, 0)


@pytest.mark.parametrize("right", [0.0, 0.3])
@pytest.mark.parametrize("streams", [1, 16])
@pytest.mark.parametrize("cost", [waits_for_weights, half, both, computes])
def test_never_below_98_percent(cost: Callable[[int], float], streams: int, right: float) -> None:
    assert without_drafts(cost, streams) / duration(cost, streams, right, 4) >= 0.98


@pytest.mark.parametrize("streams", [1, 4])
def test_right_drafts_are_not_held_back(streams: int) -> None:
    """The worker has 1.5 of 4 drafts on average: with all of them, 2.3 tokens come of a step."""
    assert without_drafts(waits_for_weights, streams) / duration(waits_for_weights, streams, 1.0, 4) > 2.0


def test_reading_texts_costs_no_more_than_two_percent() -> None:
    """A drafting model reads a text before it can draft; its drafts are always wrong here. Few texts are begun."""
    cost = StepCost()
    for _ in range(8):
        cost.observe(StepShape(1, 100, 0, 0, 0), 50.0)
        cost.observe(StepShape(2, 100, 0, 0, 0), 51.0)
    lengths, spent, begun, steps = DraftLength(cost), 0.0, 0, 8000
    record = DraftRecord()
    for step in range(steps):
        if step % 40 == 0:  # another request
            record = DraftRecord()
        (length,), _ = lengths.choose([record], 100, 4, 100)
        read_ms = 400.0 if length and record.is_read is None else 0.0
        if length:
            begun += record.is_read is None
            record.is_read = True
            lengths.observe(record, length, length, 0)
        lengths.finished(1, length, 0, 100, 5.0 * length, read_ms)
        spent += read_ms
    assert begun > 2
    assert spent <= 0.01 * 50.0 * steps + 2 * 400.0


def test_gains_pay_for_reading() -> None:
    """Drafts that are right bring more than reading costs: nearly all requests are begun."""
    cost = StepCost()
    for _ in range(8):
        for rows in (1, 2, 3, 4, 5):
            cost.observe(StepShape(rows, 100, 0, 0, 0), 49.0 + rows)
    lengths, begun, record = DraftLength(cost), 0, DraftRecord()
    for step in range(4000):
        if step % 40 == 0:
            record = DraftRecord()
        (length,), _ = lengths.choose([record], 100, 4, 100)
        read_ms = 400.0 if length and record.is_read is None else 0.0
        if length:
            begun += record.is_read is None
            record.is_read = True
            lengths.observe(record, length, length, length)
        lengths.finished(1, length, length, 100, 5.0 * length, read_ms)
    assert begun > 90


def test_one_text_is_begun_at_a_time_and_read_to_its_end() -> None:
    cost = StepCost()
    for _ in range(8):
        for rows in (4, 5, 8):
            cost.observe(StepShape(rows, 100, 0, 0, 0), 50.0)
    lengths, records = DraftLength(cost), [DraftRecord() for _ in range(4)]
    lengths.finished(4, 0, 0, 100, 0.0, 1e-3)  # so that it knows that texts are read
    for _ in range(8):
        lengths.observe(DraftRecord(), 1, 1, 1)
    found, _ = lengths.choose(records, 100, 4, 100)
    assert [bool(length) for length in found] == [True, False, False, False]
    records[0].is_read = False
    lengths.finished(4, 0, 0, 100, 0.0, 500.0)
    found, _ = lengths.choose(records, 100, 4, 100)
    assert [bool(length) for length in found] == [True, False, False, False]


def test_what_is_lost_must_be_earned() -> None:
    account = DraftAccount()
    allowed = [account.allows]
    account.passed(1, 10.0, 0.0)
    allowed.append(account.allows)
    account.passed(1, 10.0, 10.0 * FIRST_TOKENS + 5.0)
    while len(allowed) < 1000:
        allowed.append(account.allows)
        account.passed(1, 10.0, 0.0)
    assert allowed[:2] == [False, True]
    steps = allowed.index(True, 2) - 2
    assert steps == pytest.approx(5.0 / (10.0 * SHARE), abs=2)


def test_a_pause_of_the_machine_does_not_end_drafts() -> None:
    account = DraftAccount()
    account.passed(1, 10.0, 0.0)
    account.passed(1, 10.0, 10_000.0)
    steps = 0
    while not account.allows:
        account.passed(1, 10.0, 0.0)
        steps += 1
    assert steps == pytest.approx(MOST_STEPS / SHARE, abs=2)


def test_old_gains_do_not_pay_for_long() -> None:
    account = DraftAccount()
    for _ in range(1000):
        account.passed(1, 10.0, -20.0)
    for _ in range(int(MOST_STEPS) + 1):
        assert account.allows
        account.passed(1, 10.0, 10.0)
    assert not account.allows


BATCH = 64  # steps whose texts a block follows at once


def kept(account: KeepAccount, share: float, gain_ms: float = 0.0, steps: int = 20_000) -> tuple[float, int]:
    """Steps of 50 ms. share: what the block takes of a step. Returns the share of all time, and how often it left."""
    spent, late, leaves = 0.0, 0.0, 0
    for step in range(steps):
        followed = account.allows
        late += 50.0 * share * followed
        keep_ms = 0.0
        if step % BATCH == 0 or not followed:
            keep_ms, late = late, 0.0
        account.gained(gain_ms * followed)
        account.passed(50.0, keep_ms)
        spent += keep_ms
        leaves += followed and not account.allows
    return spent / (50.0 * steps), leaves


def test_a_costly_block_leaves_the_texts_from_time_to_time() -> None:
    """In a model of few layers, whose drafts are never right."""
    spent, leaves = kept(KeepAccount(), 0.03)
    assert spent <= SHARE + 0.001
    assert leaves > 10


def test_a_cheap_block_and_one_that_pays_follow_the_texts() -> None:
    spent, leaves = kept(KeepAccount(), 0.009)
    assert spent == pytest.approx(0.009, rel=0.01)
    assert leaves == 0
    assert kept(KeepAccount(), 0.03, gain_ms=1.5)[1] == 0


def test_prompts_count_by_their_time() -> None:
    """A prompt that the block follows for longer than all steps so far pay is the last for a while."""
    account = KeepAccount()
    account.passed(20.0, 0.0)
    account.passed(10_000.0, 300.0)
    assert account.allows  # 3% of it, of which 1% is paid; it owes less than such a step
    account.passed(20.0, 0.0)
    assert not account.allows


@pytest.mark.parametrize("right", [0.0, 0.9])
def test_plans_say_whether_the_block_follows(right: float) -> None:
    """The worker's block takes a twentieth of a step. Its time is none of the steps' cost."""
    world = World(Limits(100_000, 64, 4000, 512, 200, max_drafts=4), lambda result: 50.0)
    world.worker.right_drafts = right
    step, told = world.worker.step, []

    def keeping(plan: StepPlan) -> StepResult:
        told.append(plan.keeps_block)
        return msgspec.structs.replace(step(plan), draft_keep_ms=2.5 * plan.keeps_block)

    world.worker.step = keeping  # type: ignore[method-assign]
    world.add(request(0, 20, ANSWER))
    world.run()
    assert all(told) == (right > 0.5)
    if right < 0.5:
        assert 0.1 < sum(told) / len(told) < 0.4
    cost = world.scheduler._planner._cost.decode_ms(1, 100)
    assert cost < 51.0

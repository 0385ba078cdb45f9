"""How many drafts a step has: on told numbers, and in a world where steps cost what they are told to."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from moeserve.messages.steps import StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.policy.draft_length import LEARNING, TRIED_EVERY, DraftLength
from moeserve.router.core.policy.step_cost import StepCost, StepShape
from moeserve.router.core.request import DraftRecord
from tests.support.router.router_world import World, request
from tests.support.router.step_durations import both, computes, waits_for_weights

ANSWER = 400


def told(ms: Callable[[int], float], *, draft_ms: float = 0.0, right: float = 0.7) -> DraftLength:
    """One that has seen steps of any number of rows, and drafts of which this share was right."""
    cost = StepCost()
    for _ in range(8):
        for rows in (1, 2, 3, 4, 8, 16, 32, 64):
            cost.observe(StepShape(rows, 100, 0, 0, 0), ms(rows))
    lengths = DraftLength(cost)
    record = DraftRecord()
    for number in range(4 * LEARNING):
        lengths.observe(record, 1, 1, int((number * right) % 1.0 + right >= 1.0))
        lengths.observe_time(1, draft_ms)
    for _ in range(1000):
        lengths.finished(8, 0, 0, 100, 0.0)
    return lengths


def record_of(right: float, *, made: float = 1.0) -> DraftRecord:
    """A request of whose drafts this share was right lately, as far as each has been reached."""
    return DraftRecord(right=20.0 * right, wrong=20.0 * (1.0 - right), made=made)


def chosen(lengths: DraftLength, records: list[DraftRecord], most: int = 8) -> list[int]:
    return lengths.choose(records, 100, most, 10_000)[0]


def test_all_that_may_be_where_rows_cost_nothing() -> None:
    assert chosen(told(waits_for_weights), [record_of(0.9)]) == [8]


def test_none_where_a_row_costs_a_token() -> None:
    assert chosen(told(computes), [record_of(0.9)] * 3) == [0, 0, 0]


def test_all_that_may_be_of_many_right_ones() -> None:
    """A row costs 0.45 of a token here, so that 16 right drafts bring twice the speed, and a token then takes hardly
    more time than a row."""
    lengths = told(lambda rows: 27.5 + 22.5 * rows, right=1.0)
    assert chosen(lengths, [record_of(1.0)], 16) == [16]
    assert chosen(lengths, [record_of(0.98)], 16)[0] >= 8
    assert chosen(lengths, [record_of(0.3)], 16) == [0]


def test_the_longer_the_likelier() -> None:
    """A row costs a fifth of a token here, so that a draft should be right more often than that."""
    lengths = told(lambda rows: 40.0 + 10.0 * rows)
    found = [chosen(lengths, [record_of(right)])[0] for right in (0.1, 0.5, 0.7, 0.9)]
    assert found == sorted(found)
    assert found[0] == 0
    assert 1 <= found[1] <= 2
    assert found[3] >= 5


def test_each_request_as_it_deserves() -> None:
    found = chosen(told(lambda rows: 40.0 + 4.0 * rows), [record_of(0.1), record_of(0.9), record_of(0.6)])
    assert found[0] == 0
    assert found[1] > found[2] > 0


def test_drafting_itself_costs() -> None:
    few = chosen(told(waits_for_weights, draft_ms=20.0), [record_of(0.8)])[0]
    assert 1 <= few < 8
    assert chosen(told(waits_for_weights, draft_ms=60.0), [record_of(0.8)]) == [0]


def test_what_is_seldom_drafted_is_judged_by_what_is() -> None:
    """Look-up that seldom finds anything costs nothing then."""
    assert chosen(told(lambda rows: 40.0 + 4.0 * rows), [record_of(0.8, made=0.05)])[0] > 0


def test_no_more_than_the_step_takes() -> None:
    lengths, expected = told(waits_for_weights).choose([record_of(0.9)] * 5, 500, 4, 7)
    assert sum(lengths) == 7 == round(expected)
    assert told(waits_for_weights).choose([record_of(0.9)] * 2, 500, 4, 0) == ([0, 0], 0.0)
    assert told(waits_for_weights).choose([], 0, 4, 7) == ([], 0.0)


def test_wrong_drafts_are_tried_less_and_less() -> None:
    lengths, record = told(lambda rows: 40.0 + 10.0 * rows), record_of(0.0)
    tried = []
    for step in range(1500):
        (count,), _ = lengths.choose([record], 100, 4, 100)
        if count:
            tried.append(step)
            lengths.observe(record, count, count, 0)
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert tried[0] == TRIED_EVERY - 1
    assert gaps == [2 * TRIED_EVERY, 4 * TRIED_EVERY, 8 * TRIED_EVERY]  # of one request, rows are steps


def test_a_right_trial_brings_drafts_back() -> None:
    lengths, record = told(lambda rows: 40.0 + 10.0 * rows), record_of(0.0)
    found = []
    for _ in range(400):
        (count,), _ = lengths.choose([record], 100, 4, 100)
        found.append(count)
        if count:
            lengths.observe(record, count, count, count)
    assert sum(found[:60]) == 0
    assert min(found[-20:]) >= 3


def test_none_is_tried_where_even_right_drafts_would_not_pay() -> None:
    lengths, records = told(computes), [record_of(0.5) for _ in range(3)]
    assert not any(sum(chosen(lengths, records)) for _ in range(3 * TRIED_EVERY))


def test_a_step_that_waits_for_the_host() -> None:
    """As a GPU's with drafts do: they must bring more than the wait, however many there are."""
    lengths = told(waits_for_weights)
    assert chosen(lengths, [record_of(0.3)]) != [0]
    for _ in range(40):
        lengths.observe_time(4, 0.0, 40.0)
    assert chosen(lengths, [record_of(0.9)]) == [8]
    assert chosen(lengths, [record_of(0.3)]) == [0]


def test_a_slow_first_step_does_not_end_drafting() -> None:
    """As a GPU's first chain is: it takes a hundred times as long as those after it."""
    cost = StepCost()
    for _ in range(8):
        for rows in (1, 2, 3, 4, 8):
            cost.observe(StepShape(rows, 100, 0, 0, 0), waits_for_weights(rows))
    lengths, record = DraftLength(cost), DraftRecord()
    without, waited = cost.decode_ms(1, 100), 0
    lengths.finished(1, 0, 0, 100, 0.0)
    for draft_ms in [100.0 * without] + [0.1 * without] * (LEARNING - 1):
        while (counts := chosen(lengths, [record])) == [0]:
            lengths.finished(1, 0, 0, 100, 0.0)
            waited += 1
        assert counts == [1]
        lengths.observe(record, 1, 1, 1)
        lengths.observe_time(1, draft_ms)
        lengths.finished(1, 1, 1, 100, draft_ms)
    assert waited <= 100
    assert chosen(lengths, [record])[0] > 1


def test_trials_are_rarer_where_a_step_waits_for_them() -> None:
    """With four requests a trial that takes three quarters of a step costs as much as three rows."""

    def first_trial(wait_ms: float) -> int:
        lengths, records = told(lambda rows: 40.0 + 10.0 * rows), [record_of(0.0) for _ in range(4)]
        for _ in range(40):
            lengths.observe_time(1, 0.0, wait_ms)
        return next(step for step in range(1000) if sum(chosen(lengths, records)))

    assert first_trial(0.0) == TRIED_EVERY // 4 - 1
    assert first_trial(50.0) == pytest.approx(3 * TRIED_EVERY // 4, abs=2)  # 60 of 80 ms, with its row


def world_of(cost: Callable[[int], float]) -> World:
    """cost: milliseconds of a step, by its rows and drafts. Of the worker's drafts, a row has up to four, and some
    two thirds are right."""

    def step_ms(result: StepResult) -> float:
        return cost(sum(1 + (one.accepted.drafted if one.accepted else 0) for one in result.sampled))

    return World(Limits(100_000, 64, 4000, 512, 200, max_drafts=4), step_ms)


def shares(world: World, streams: int, parts: int = 4) -> list[float]:
    """The share of decode rows that might have drafts, of equal parts of the time."""
    for id in range(streams):
        world.add(request(id, 20, ANSWER))
    had: list[float] = []
    while True:
        while world.plan() is not None:
            pass
        if not world.in_flight:
            break
        rows = [row.count > 1 for row in world.in_flight[0].rows if row.start == -1]
        had.append(sum(rows) / max(len(rows), 1))
        world.result()
    size = len(had) // parts
    return [sum(had[at * size : (at + 1) * size]) / size for at in range(parts)]


@pytest.mark.parametrize("streams", [1, 8])
def test_drafts_go_on_where_rows_cost_little(streams: int) -> None:
    assert min(shares(world_of(waits_for_weights), streams)) > 0.8


@pytest.mark.parametrize("streams", [1, 8])
def test_drafts_pause_where_rows_cost_as_much_as_steps(streams: int) -> None:
    assert max(shares(world_of(computes), streams)[1:]) < 0.15


def test_drafts_pause_where_many_requests_run() -> None:
    assert shares(world_of(both), 1)[-1] > 0.8
    assert shares(world_of(both), 40)[-2] < 0.2


def test_they_come_back_when_few_run() -> None:
    world = world_of(both)
    for id in range(100, 140):
        world.add(request(id, 20, 60))
    world.run()
    assert shares(world, 1)[-1] > 0.8

"""Drafts pause where they do not pay, and come back where they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moeserve.messages.steps import StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.policy.draft_pause import TRIED_EVERY
from tests.support.router_world import World, request

ANSWER = 400


def world_of(cost: Callable[[int], float]) -> World:
    """cost: milliseconds of a step, by its rows and drafts. Of the worker's drafts, a row has up to four, and some
    two thirds are right."""

    def step_ms(result: StepResult) -> float:
        return cost(sum(1 + (one.accepted.drafted if one.accepted else 0) for one in result.sampled))

    return World(Limits(100_000, 64, 4000, 512, 200, max_drafts=4), step_ms)


def shares(world: World, streams: int, parts: int = 4) -> list[float]:
    """The share of steps that had drafts, of equal parts of the time."""
    for id in range(streams):
        world.add(request(id, 20, ANSWER))
    had: list[bool] = []
    while True:
        while world.plan() is not None:
            pass
        if not world.in_flight:
            break
        had.append(any(row.count > 1 for row in world.in_flight[0].rows if row.start == -1))
        world.result()
    size = len(had) // parts
    return [sum(had[at * size : (at + 1) * size]) / size for at in range(parts)]


def waits_for_weights(rows: int) -> float:
    return 50.0 + 0.1 * rows


def computes(rows: int) -> float:
    return 0.5 + 5.0 * rows


def both(rows: int) -> float:
    """As weights that are read for a few rows, and products that take longer for many."""
    return max(40.0, 4.0 * rows)


@pytest.mark.parametrize("streams", [1, 8])
def test_drafts_go_on_where_rows_cost_little(streams: int) -> None:
    assert min(shares(world_of(waits_for_weights), streams)) > 0.8


@pytest.mark.parametrize("streams", [1, 8])
def test_drafts_pause_where_rows_cost_as_much_as_steps(streams: int) -> None:
    later = shares(world_of(computes), streams)[1:]
    assert max(later) < 0.1
    assert max(later) >= 1 / (2 * TRIED_EVERY), "they are tried again"


def test_drafts_pause_where_many_requests_run() -> None:
    assert shares(world_of(both), 1)[-1] > 0.8
    assert shares(world_of(both), 40)[-2] < 0.2


def test_they_come_back_when_few_run() -> None:
    world = world_of(both)
    for id in range(100, 140):
        world.add(request(id, 20, 60))
    world.run()
    assert shares(world, 1)[-1] > 0.8

"""Runs plans in turn. As in a server, the worker has the next plan while it computes a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from moeserve.messages.steps import StepPlan, StepResult
from moeserve.messages.worker import OverlappingWorker, Worker


class Answered(NamedTuple):
    result: StepResult
    is_ahead: bool  # launched while the step before was being computed


def run_in_turn(worker: Worker, plans: Iterable[StepPlan]) -> Iterator[Answered]:
    """Yields the results in order. If the worker launches ahead, the next plan is launched while the current step runs,
    if `may_follow` allows it. Every plan must have rows."""
    if not worker.runs_ahead:
        for plan in plans:
            yield Answered(worker.step(plan), is_ahead=False)
        return
    runner = cast(OverlappingWorker, worker)
    is_ahead = False  # whether the current step was launched ahead
    for plan in plans:
        if runner.is_under_way and runner.may_follow(plan):
            result = runner.advance(plan)
            runner.launch_rest()
            yield Answered(result, is_ahead)
            is_ahead = True
            continue
        if runner.is_under_way:
            yield Answered(runner.finish(), is_ahead)
        runner.start(plan)
        is_ahead = False
    if runner.is_under_way:
        yield Answered(runner.finish(), is_ahead)

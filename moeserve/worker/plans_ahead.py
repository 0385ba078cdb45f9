"""Calls that come while a step is computed, for a worker that may launch the next plan before it has the result.

A call that is taken meanwhile is nested in the one that waits. Answers leave in the order of the calls, whichever call
carries them: the nested one returns the result of the step before it, and the waiting one what was called last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from moeserve.messages.steps import StepPlan
from moeserve.messages.worker import OverlappingWorker, Worker, WorkerAnswer


class PlansAhead:
    """Executes the calls of one line, in their order."""

    def __init__(self, worker: Worker, take_call: Callable[[], None]) -> None:
        """take_call: executes a call if one comes soon; it calls `step` or `answer` here."""
        self._worker = worker
        self._overlapping = cast(OverlappingWorker, worker) if worker.runs_ahead else None
        self._take_call = take_call
        self._later: WorkerAnswer | None = None  # of a nested call that was no plan

    def step(self, plan: StepPlan) -> WorkerAnswer:
        worker = self._overlapping
        if worker is None or not plan.rows:
            return self.answer(lambda: self._worker.step(plan))
        if not worker.is_under_way:
            worker.start(plan)
            return self._result(worker)
        if worker.may_follow(plan):
            return worker.advance(plan)
        result = worker.finish()
        worker.start(plan)
        return result

    def answer(self, call: Callable[[], WorkerAnswer]) -> WorkerAnswer:
        """Of a call that needs the steps before it to have ended."""
        worker = self._overlapping
        if worker is None or not worker.is_under_way:
            return call()
        result = worker.finish()
        self._later = call()
        return result

    def _result(self, worker: OverlappingWorker) -> WorkerAnswer:
        """Of the last call, with those that come meanwhile."""
        while worker.is_under_way:
            worker.launch_rest()  # of a plan whose call has just returned the result before it
            if worker.is_computed:
                break
            self._take_call()
        if self._later is None:
            return worker.finish()
        later, self._later = self._later, None
        return later

"""Calls that come while a step is computed, for a worker that may launch the next plan before it has the result.

A call that is taken meanwhile is nested in the call that waits. Answers leave in the order of the calls, whichever call
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
        # Of the nested call that was last, what its place in the order does not let it do before it returns.
        self._plan: StepPlan | None = None
        self._call: Callable[[], WorkerAnswer] | None = None

    def step(self, plan: StepPlan) -> WorkerAnswer:
        worker = self._overlapping
        if worker is None or not plan.rows:
            return self.answer(lambda: self._worker.step(plan))
        if not worker.is_under_way:
            worker.start(plan)
            return self._result(worker)
        if worker.may_follow(plan):
            return worker.advance(plan)
        self._plan = plan
        return worker.finish()

    def answer(self, call: Callable[[], WorkerAnswer]) -> WorkerAnswer:
        """Answers a call that needs the steps before it to have ended."""
        worker = self._overlapping
        if worker is None or not worker.is_under_way:
            return call()
        self._call = call
        return worker.finish()

    def _result(self, worker: OverlappingWorker) -> WorkerAnswer:
        """The result of the last call, with the results that come meanwhile. What a nested call has left is done when
        its answer, the result of the step before, is on its way."""
        while worker.is_under_way:
            worker.launch_rest()
            if worker.is_computed:
                return worker.finish()
            self._take_call()
            if self._plan is not None:
                plan, self._plan = self._plan, None
                worker.start(plan)
        assert self._call is not None
        call, self._call = self._call, None
        return call()

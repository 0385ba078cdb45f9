"""Handles calls that arrive while a step is computed, in a worker that can launch the next plan before it has the
result.

Such a call is executed nested inside the waiting call. Answers are sent in the order of the calls, whichever call
returns them: the nested call returns the previous step's result, and the waiting call that of the last call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from moeserve.messages.steps import StepPlan
from moeserve.messages.worker import OverlappingWorker, Worker, WorkerAnswer


class PlansAhead:
    """Executes the calls of one connection in order."""

    def __init__(self, worker: Worker, take_call: Callable[[], None]) -> None:
        """take_call: executes a call if one arrives soon; that calls `step` or `answer` of this object."""
        self._worker = worker
        self._overlapping = cast(OverlappingWorker, worker) if worker.runs_ahead else None
        self._take_call = take_call
        # Work of the last nested call that must wait until its answer has been sent.
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
        """Answers a call that needs all earlier steps to have ended."""
        worker = self._overlapping
        if worker is None or not worker.is_under_way:
            return call()
        self._call = call
        return worker.finish()

    def _result(self, worker: OverlappingWorker) -> WorkerAnswer:
        """Returns the result of the last call, and meanwhile those of calls that arrive. A nested call's remaining
        work is done after its answer (the previous step's result) was sent."""
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

"""Handles calls that arrive while a step is computed, in a worker that can launch the next plan before the current
result is known.

Such a call runs nested inside the call that waits for the step. The connection sends replies in the order of the calls,
and the nested call returns first: so it returns the result of the earlier step, and the outer call returns the result
of the last call.

A plan that waits when a step has been computed is also launched before that step's result is encoded and sent, which
takes the time of a few kernels. A step with drafts depends on this: its tokens decide where the next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, cast

from moeserve.messages.steps import StepPlan
from moeserve.messages.worker import OverlappingWorker, Worker, WorkerAnswer

# Interval of checks for a call while a step is computed; other threads of the process run in between.
LOOK_S: Final = 20e-6


class PlansAhead:
    """Executes the calls of one connection in order."""

    def __init__(self, worker: Worker, take_call: Callable[[], bool]) -> None:
        """take_call: executes a call that has arrived, which calls this object's `step` or `answer`. Returns whether
        there was one."""
        self._worker = worker
        self._overlapping = cast(OverlappingWorker, worker) if worker.runs_ahead else None
        self._take_call = take_call
        # Work of the last nested call to be done after its reply has been sent.
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
        """Waits for the running step and returns the last call's result. Meanwhile executes arriving calls; a nested
        call's remaining work is done after its reply, the previous step's result, was sent."""
        while worker.is_under_way:
            worker.launch_rest()
            if not self._take_call():
                if worker.is_computed:
                    return worker.finish()
                time.sleep(LOOK_S)
            if self._plan is not None:
                plan, self._plan = self._plan, None
                worker.start(plan)
        assert self._call is not None
        call, self._call = self._call, None
        return call()

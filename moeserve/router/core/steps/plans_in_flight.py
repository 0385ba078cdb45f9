"""The plans sent to the worker but not answered, oldest first; the worker executes them in this order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from moeserve.messages.steps import StepResult
from moeserve.router.core.request import Request
from moeserve.router.core.steps.scheduled_step import ScheduledStep

MAX_PLANS_IN_FLIGHT = 2
# While a step longer than this runs, the next one is not planned yet: the idle gap after it, below a millisecond, is
# negligible, and requests that arrive meanwhile join the next step instead of the one after.
PLAN_AHEAD_MS = 100.0


class ProtocolError(Exception):
    """The worker's result does not belong to the oldest plan in flight; none of its results can be trusted."""


class PlansInFlight:
    def __init__(self) -> None:
        self._plans: deque[ScheduledStep] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def append(self, plan: ScheduledStep) -> None:
        self._plans.append(plan)

    def clear(self) -> None:
        """Drops all plans, which will never be answered."""
        self._plans.clear()

    def answered(self, result: StepResult) -> ScheduledStep:
        """Removes and returns the oldest plan. Raises ProtocolError if `result` belongs to another one."""
        if not self._plans or self._plans[0].step != result.step:
            raise ProtocolError(f"the worker answered step {result.step}, which is not the oldest in flight")
        plan = self._plans.popleft()
        if len(result.sampled) != len(plan.sampling):
            raise ProtocolError(f"{len(result.sampled)} tokens for {len(plan.sampling)} rows that sample")
        return plan

    @property
    def has_room(self) -> bool:
        """Returns whether another plan may be sent before the oldest is answered."""
        if not self._plans:
            return True
        return len(self._plans) < MAX_PLANS_IN_FLIGHT and self._plans[-1].expected_ms < PLAN_AHEAD_MS

    def owners(self) -> Iterator[Request]:
        """Yields the requests with rows in these plans; a request may occur several times."""
        for plan in self._plans:
            yield from plan.owners

    @property
    def described(self) -> str:
        """Returns a description of the unanswered plans, for a log line."""
        return self._plans[0].described if self._plans else "idle"

    @property
    def awaited(self) -> tuple[int, float] | None:
        """Returns the oldest plan's number and expected milliseconds (0: unknown); None if there is no plan."""
        return (self._plans[0].step, self._plans[0].expected_ms) if self._plans else None

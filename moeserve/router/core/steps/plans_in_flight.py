"""The plans that were sent to the worker and not answered, the oldest first; the worker executes them in this order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from moeserve.messages.steps import StepResult
from moeserve.router.core.request import Request
from moeserve.router.core.steps.scheduled_step import ScheduledStep

MAX_PLANS_IN_FLIGHT = 2
# While a step this long runs, the next one is not planned yet: the idle gap after it, below a millisecond, is
# negligible, and a request that arrives meanwhile joins the next step, not the one after.
PLAN_AHEAD_MS = 100.0


class ProtocolError(Exception):
    """The worker's result is not that of the oldest plan in flight, so that none of its results can be trusted."""


class PlansInFlight:
    def __init__(self) -> None:
        self._plans: deque[ScheduledStep] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def append(self, plan: ScheduledStep) -> None:
        self._plans.append(plan)

    def clear(self) -> None:
        """They will never be answered."""
        self._plans.clear()

    def answered(self, result: StepResult) -> ScheduledStep:
        """Removes and returns the oldest plan. Raises ProtocolError when `result` is not its result."""
        if not self._plans or self._plans[0].step != result.step:
            raise ProtocolError(f"the worker answered step {result.step}, which is not the oldest in flight")
        plan = self._plans.popleft()
        if len(result.sampled) != len(plan.sampling):
            raise ProtocolError(f"{len(result.sampled)} tokens for {len(plan.sampling)} rows that sample")
        return plan

    @property
    def has_room(self) -> bool:
        """Whether one more may be planned before the oldest is answered."""
        if not self._plans:
            return True
        return len(self._plans) < MAX_PLANS_IN_FLIGHT and self._plans[-1].expected_ms < PLAN_AHEAD_MS

    def owners(self) -> Iterator[Request]:
        """The requests that have rows in them; one may come several times."""
        for plan in self._plans:
            yield from plan.owners

    @property
    def described(self) -> str:
        """What the worker was told to compute and has not answered, for a log line."""
        return self._plans[0].described if self._plans else "idle"

    @property
    def awaited(self) -> tuple[int, float] | None:
        """The oldest one's number, and how long it was expected to take in milliseconds; 0: not known."""
        return (self._plans[0].step, self._plans[0].expected_ms) if self._plans else None

"""Whether drafts pay. A drafted row costs what any row costs: little while a step waits for weights, much once it
computes for many requests. So drafts pause where the tokens that they bring take longer than without them: by the
measured cost of steps, and by what rows of the last steps have drafted and kept.

While drafts pause nothing is learnt of them, and texts change. So a step of every TRIED_EVERY has some.
"""

from __future__ import annotations

from moeserve.router.core.policy.step_cost import StepCost, StepShape

KEEP = 0.9  # of a moving average, beside a new step
LOSS = 0.9  # drafts pause below this share of the tokens per second without any: both times are estimates
TRIED_EVERY = 64  # steps with rows that may have drafts


class DraftPause:
    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._drafted = 0.0  # tokens a row, of steps that might have drafts
        self._accepted = 0.0  # of these, right ones
        self._made = 1.0  # of the drafts that rows may have, the share that the worker makes
        self._num_steps = 0  # observed
        self._paused_for = 0  # steps

    def pays(self, rows: int, context: int) -> bool:
        """Whether the next step, of these decode rows, may have drafts. context: positions that they attend to."""
        if self._is_worth_it(rows, context) or self._paused_for + 1 >= TRIED_EVERY:
            self._paused_for = 0
            return True
        self._paused_for += 1
        return False

    def _is_worth_it(self, rows: int, context: int) -> bool:
        without = self._cost.predict(StepShape(rows, context, 0, 0, 0))
        more = rows + round(rows * self._drafted)
        drafting = self._cost.predict(StepShape(more, context, 0, 0, 0))
        if not self._num_steps or without <= 0.0:
            return True
        return (1.0 + self._accepted) * without >= LOSS * drafting

    def expected(self, drafts: int) -> int:
        """How many of the drafts that rows may have the worker will make."""
        return round(self._made * drafts)

    def observe(self, rows: int, allowed: int, drafted: int, accepted: int) -> None:
        """What became of a step of `rows` rows that might have `allowed` drafts, more than none."""
        self._made += (1.0 - KEEP) * (drafted / allowed - self._made)
        kept = KEEP if self._num_steps else 0.0
        self._drafted = kept * self._drafted + (1.0 - kept) * drafted / rows
        self._accepted = kept * self._accepted + (1.0 - kept) * accepted / rows
        self._num_steps += 1

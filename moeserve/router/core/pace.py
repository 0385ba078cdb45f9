"""How much of a step prompts may take, so that answers under way keep their pace.

Every step serves every decode row; what prompt tokens add to it is a stall for all of them. Two bounds:

- The length of one stall. Without a limit on inter-token latency it is long enough to be efficient: a small chunk
  reads almost as many experts as a large one, so one that lasts `WORTH` times as long as reading them wastes no
  more than a fifth of it. With a limit, a stall takes what the limit leaves it, up to where that gains nothing:
  whoever allows longer stalls gets more out of them.
- The share of the time. Stalls make a debt that steps pay off, each in proportion to its own length; while
  there is debt, no prompt is served. So prompts get `prefill_share` of the time, in turns, and answers keep
  1 - prefill_share of the speed they have without prompts. Where more prompts are there than answers, each
  prompt gets what it would get beside one answer: a backlog is worked off, not kept.

One engine is shared by both, so their shares add up to 1: a prompt beside an answer takes 1 / prefill_share times
as long as alone (2.5 times at the default), and making that less takes it from the answer.
"""

from __future__ import annotations

from moeserve.router.core.step_cost import StepCost

WORTH = 4.0  # a stall among answers, in multiples of what the chunk pays once: 1 / (1 + 4) of it is overhead
WORTH_ALONE = 12.0  # a chunk without answers: a thirteenth. It has an end because newcomers wait for it
ALONE_MS = 50.0  # but that much is always fine
LEAST_CHUNK = 16  # tokens; a limit that not one can keep is broken by so many, in their share of the time
LEAST_MS = 1e-3  # more than nothing: no debt
UNLIMITED_MS = 1e9


class Pace:
    def __init__(self, cost: StepCost, max_itl_ms: float | None, prefill_share: float) -> None:
        """0 < prefill_share < 1."""
        self._cost = cost
        self._max_itl_ms = max_itl_ms
        self._share = prefill_share
        self._debt_ms = 0.0

    def prefill_budget_ms(self, rows: int, alone_ms: float, protected_share: float) -> float:
        """Milliseconds that prompts may add now to a step of `rows` decode rows, which takes `alone_ms` without them.

        `protected_share` is the share of the rows whose pace counts (see `FairShare.protected_share`). The smaller it
        is, the closer the budget is to that of a step without decode rows. The limit on inter-token latency holds for
        every row."""
        if not self._cost.is_fitted:
            return UNLIMITED_MS
        if rows and protected_share and self._debt_ms > 0.0:
            return 0.0
        stall = self.stall_ms(rows, alone_ms, protected_share)
        if rows and self._max_itl_ms is not None:
            most = max(stall, self.stall_ms(rows, alone_ms, 0.0))
            stall = min(most, self._max_itl_ms / self._cost.spread - alone_ms)
        return max(stall, LEAST_MS)

    def stall_ms(self, rows: int, alone_ms: float, protected_share: float) -> float:
        """How long answers may be stalled at once, or a first token that is ready."""
        short = max(alone_ms, WORTH * self._cost.fixed_ms(rows))
        if protected_share == 1.0:
            return short
        long = max(alone_ms, ALONE_MS, WORTH_ALONE * self._cost.fixed_ms(0))
        return protected_share * short + (1.0 - protected_share) * long

    def planned(
        self, rows: int, alone_ms: float, stall_ms: float, protected_share: float, prompts: int
    ) -> None:
        """A step was planned with such a stall, while `prompts` were there that could be served."""
        if not rows:
            self._debt_ms = 0.0
            return
        weight = self._share / (1.0 - self._share)  # of a prompt, where a decode row has 1
        earned = alone_ms * weight * max(1.0, prompts / rows)
        self._debt_ms = max(self._debt_ms + stall_ms * protected_share - earned, 0.0)

    def corrected(self, expected_ms: float, actual_ms: float, protected_share: float) -> None:
        """A step with a stall took more or less than expected. What is more than twice as long is somebody
        else's doing, and not charged to prompts."""
        late_ms = min(actual_ms - expected_ms, expected_ms)
        self._debt_ms = max(self._debt_ms + late_ms * protected_share, 0.0)

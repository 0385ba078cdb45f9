"""The prefill budget: how many milliseconds prompts may add to a step, so that decoding requests keep their pace.

Every step serves every decode row, and what prompt tokens add to the step stalls all of them. Two bounds hold:

- The length of one stall. Without a limit on inter-token latency, a stall is long enough to be efficient. A small chunk
  reads almost as many experts as a large one, so a chunk that lasts STALL_PER_FIXED_COST times as long as reading them
  spends at most a fifth of its time on them. With a limit, a stall may take what the limit leaves, up to the length
  from which on more gains nothing.
- The share of the time. Stalls add to a debt, and each step pays off a part in proportion to its own length. While
  there is debt, no prompt is served. So prompts get `prefill_share` of the time, in turns, and answers keep
  1 - prefill_share of the speed that they have without prompts. When there are more prompts than answers, each prompt
  gets the time that it would get beside one answer, so that a backlog of prompts shrinks.

Where a prompt's chunks bring experts from RAM to a GPU, whatever their size, a chunk beside answers is as long as one
alone, and a prompt has few of them. The time of the chunk to come is then a debt already when one is served: else the
pause behind the last one would be missing where only a few count, and answers would lose more than their share.

At a share of 1, prompts come first: a step takes as many of their tokens as it has room for, and answers get a token
with each. That serves throughput, and it is the default where all experts are on a GPU: a step of 8,192 prompt tokens
takes half a second there, and one of 500 is hardly shorter than one of 16. A limit on inter-token latency holds all the
same.

Below 1, prompts and answers share one engine, so their shares add up to 1. Beside an answer, a prompt takes
1 / prefill_share times as long as alone, 2.5 times at the default. A larger share takes the difference from the answer.
"""

from __future__ import annotations

from moeserve.router.core.policy.step_cost import StepCost

# A chunk's length in multiples of its fixed cost, which every chunk pays once: 1 / (1 + 4) of a stall is overhead.
STALL_PER_FIXED_COST = 4.0
# The same without decode rows: a thirteenth. It is bounded because requests that arrive meanwhile wait for it.
CHUNK_PER_FIXED_COST_ALONE = 12.0
LEAST_CHUNK_MS_ALONE = 50.0  # a chunk without decode rows may always take this long
# Tokens of the smallest chunk. A latency limit that even one token would break is exceeded by as many, within
# `prefill_share` of the time.
LEAST_CHUNK = 16
# What a client sees beyond a step's time, and a step aimed at the limit must leave: the way of a token from the worker
# to the client, on a GPU's server 1 to 2 ms at the 99th percentile.
LATE_SHARE, LATE_MS = 0.05, 2.0  # the smaller of the two
LEAST_BUDGET_MS = 1e-3  # positive: there is no debt
UNLIMITED_MS = 1e9


class Pace:
    def __init__(
        self, cost: StepCost, max_itl_ms: float | None, prefill_share: float, *, streams: bool = False
    ) -> None:
        """`max_itl_ms` limits the latency between two tokens of an answer; None: no limit. 0 < prefill_share <= 1.
        streams: prompts bring experts from RAM to a GPU."""
        self._cost = cost
        self._max_itl_ms = max_itl_ms
        self._share = prefill_share
        self._streams = streams
        self._debt_ms = 0.0
        self._ahead_ms = 0.0  # of the debt, what is for a chunk to come

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
            limit = self._max_itl_ms - min(LATE_SHARE * self._max_itl_ms, LATE_MS)
            stall = min(most, limit / self._cost.spread - alone_ms)
        return max(stall, LEAST_BUDGET_MS)

    def stall_ms(self, rows: int, alone_ms: float, protected_share: float) -> float:
        """The longest stall of the decode rows, or of a first token that is ready, in one step."""
        if self._share == 1.0:
            return UNLIMITED_MS
        long = max(alone_ms, LEAST_CHUNK_MS_ALONE, CHUNK_PER_FIXED_COST_ALONE * self._cost.fixed_ms(0))
        if self._streams:
            return long
        short = max(alone_ms, STALL_PER_FIXED_COST * self._cost.fixed_ms(rows))
        return protected_share * short + (1.0 - protected_share) * long

    def planned(
        self,
        rows: int,
        alone_ms: float,
        stall_ms: float,
        protected_share: float,
        prompts: int,
        next_ms: float | None = None,
    ) -> None:
        """Accounts for a planned step that stalls its decode rows for `stall_ms`, while `prompts` could be served.
        next_ms: where prompts stream, of a step with a chunk, how long the next chunk of a prompt under way will stall
        them; 0: there is none."""
        if not rows or self._share == 1.0:
            self._debt_ms = self._ahead_ms = 0.0
            return
        if next_ms is not None:
            stall_ms += next_ms - self._ahead_ms
            self._ahead_ms = next_ms
        elif not prompts:
            self._ahead_ms = 0.0
        weight = self._share / (1.0 - self._share)  # of a prompt, where a decode row has 1
        earned = alone_ms * weight * max(1.0, prompts / rows)
        self._debt_ms = max(self._debt_ms + stall_ms * protected_share - earned, 0.0)

    def corrected(self, expected_ms: float, actual_ms: float, protected_share: float) -> None:
        """Accounts for the difference to the planned duration of a step with a stall. At most twice the expected
        duration is charged to prompts, because the rest has other causes on the machine."""
        if self._share == 1.0:
            return
        late_ms = min(actual_ms - expected_ms, expected_ms)
        self._debt_ms = max(self._debt_ms + late_ms * protected_share, 0.0)

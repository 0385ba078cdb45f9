"""The prefill budget: how many milliseconds prompts may add to a step while other requests decode.

Every step serves every decode row, and prompt tokens in the step delay ("stall") all of them. Three rules apply:

- The length of one stall. Without a limit on inter-token latency, a stall is long enough to be efficient: a small chunk
  reads almost as many experts as a large one, so a chunk that lasts STALL_PER_FIXED_COST times as long as reading them
  spends at most a fifth of its time on that. With a latency limit, a stall may use the rest of the limit, but not more
  than is useful.
- The share of the time. Stalls add to a debt, and each step pays off a part proportional to its own length. No prompt
  is served while there is debt. So prompts get `prefill_share` of the time, in turns, and answers keep
  1 - prefill_share of their speed without prompts. If there are more prompts than answers, each prompt gets the time
  that it would get beside one answer, so that a backlog shrinks.
- A short prompt, of which one chunk without answers would hold all that is not cached, gets a larger share
  (SHORT_ODDS). Later turns of conversations are such prompts. The sooner their answers begin, the more answers share
  the reading of the experts: eight conversations take a ninth less time in all (docs/explanation/load.md).

If a prompt's chunks stream experts from RAM to a GPU, whatever their size, a chunk beside answers is as large as a
chunk without answers, and a prompt has few chunks. The time of the next chunk then counts as debt as soon as one is
served. If only finished chunks counted, nothing would be paid off after a prompt's last chunk, and with few chunks
answers would lose more than their share.

At a share of 1 prompts come first: a step takes as many prompt tokens as fit, and answers get one token per step.
This maximises throughput and is the default if all experts are on a GPU, where a step of 8,192 prompt tokens takes
half a second, and one of 500 is hardly shorter than one of 16. A limit on inter-token latency still holds.

Below 1, prompts and answers share one engine, so their shares add up to 1. Beside an answer, a prompt takes 1 /
share times as long as by itself: at the default 2.5 times, a short one 1.7 times. A larger share takes the difference
from the answer.
"""

from __future__ import annotations

from moeserve.router.core.policy.step_cost import StepCost

# A chunk's length as a multiple of its fixed cost: 1 / (1 + 4) of a stall is overhead.
STALL_PER_FIXED_COST = 4.0
# The same without decode rows: a thirteenth is overhead. It is limited because new requests wait for the chunk.
CHUNK_PER_FIXED_COST_ALONE = 12.0
LEAST_CHUNK_MS_ALONE = 50.0  # a chunk without decode rows may always take this long
# Smallest chunk in tokens. If even one token would break the latency limit, this many are allowed nevertheless, within
# `prefill_share` of the time.
LEAST_CHUNK = 16
# Margin between a step's time and the latency that a client sees: the way of a token from the worker to the client
# takes 1 to 2 ms at the 99th percentile on a GPU's server.
LATE_SHARE, LATE_MS = 0.05, 2.0  # the smaller of the two applies
LEAST_BUDGET_MS = 1e-3  # smallest positive budget; a budget above 0 means that there is no debt
# Factor by which the odds of short prompts against decode rows are larger: a share of 0.4 becomes 0.6.
SHORT_ODDS = 2.25
UNLIMITED_MS = 1e9


class Pace:
    def __init__(
        self, cost: StepCost, max_itl_ms: float | None, prefill_share: float, *, streams: bool = False
    ) -> None:
        """max_itl_ms: limit of the latency between two tokens of an answer; None: no limit. 0 < prefill_share <= 1.
        streams: whether prompts stream experts from RAM to a GPU."""
        self._cost = cost
        self._max_itl_ms = max_itl_ms
        self._share = prefill_share
        self._streams = streams
        self._debt_ms = 0.0
        self._ahead_ms = 0.0  # part of the debt for a chunk still to come
        self._tower_slice_ms = self._tower_share = 0.0

    def beside_tower(self, slice_ms: float, share: float) -> None:
        """Notes a vision tower's use of the device: a step may have to wait for one slice of `slice_ms` milliseconds,
        and the tower uses `share` of the time."""
        self._tower_slice_ms, self._tower_share = slice_ms, share

    def prefill_budget_ms(self, rows: int, alone_ms: float, protected_share: float) -> float:
        """Returns the milliseconds that prompts may now add to a step of `rows` decode rows, which takes `alone_ms`
        without them.

        protected_share: share of the rows whose pace counts (see `FairShare.protected_share`). The smaller it is, the
        closer the budget is to the budget of a step without decode rows. The limit on inter-token latency holds for all
        rows.
        """
        if not self._cost.is_fitted:
            return UNLIMITED_MS
        if rows and protected_share and self._debt_ms > 0.0:
            return 0.0
        stall = self.stall_ms(rows, alone_ms, protected_share)
        if rows and self._max_itl_ms is not None:
            most = max(stall, self.stall_ms(rows, alone_ms, 0.0))
            limit = self._max_itl_ms - min(LATE_SHARE * self._max_itl_ms, LATE_MS)
            limit = limit * (1.0 - self._tower_share) - self._tower_slice_ms
            stall = min(most, limit / self._cost.spread - alone_ms)
        return max(stall, LEAST_BUDGET_MS)

    def stall_ms(self, rows: int, alone_ms: float, protected_share: float) -> float:
        """Returns the longest stall in ms, in one step, of the decode rows or of a finished first token."""
        if self._share == 1.0:
            return UNLIMITED_MS
        long = max(alone_ms, LEAST_CHUNK_MS_ALONE, CHUNK_PER_FIXED_COST_ALONE * self._cost.fixed_ms(0))
        if self._streams:
            return long
        short = max(alone_ms, STALL_PER_FIXED_COST * self._cost.fixed_ms(rows))
        return protected_share * short + (1.0 - protected_share) * long

    def is_short(self, left_ms: float, alone_ms: float) -> bool:
        """Returns whether a prompt is short of which `left_ms` milliseconds are to be computed, beside decode rows
        that take `alone_ms`; False while the cost of steps is not known."""
        return self._cost.is_fitted and left_ms <= self.stall_ms(0, alone_ms, 0.0)

    def planned(
        self,
        rows: int,
        alone_ms: float,
        stall_ms: float,
        protected_share: float,
        prompts: int,
        next_ms: float | None = None,
        short_ms: float = 0.0,
    ) -> float:
        """Accounts for a planned step that stalls its decode rows for `stall_ms`, while `prompts` prompts could be
        served. short_ms: the part of the stall that is due to short prompts. next_ms: for streaming prompts, how long
        the next chunk of a running prompt will stall them; 0: no next chunk.

        Returns the share of the step's stall that is charged (see `corrected`)."""
        if not rows or self._share == 1.0:
            self._debt_ms = self._ahead_ms = 0.0
            return 0.0
        charged = protected_share
        if stall_ms > 0.0 and not self._streams:
            charged *= 1.0 - short_ms / stall_ms * (1.0 - 1.0 / SHORT_ODDS)
        debt_ms = stall_ms * charged
        if next_ms is not None:
            debt_ms += (next_ms - self._ahead_ms) * protected_share
            self._ahead_ms = next_ms
        elif not prompts:
            self._ahead_ms = 0.0
        weight = self._share / (1.0 - self._share)  # of a prompt, relative to a decode row
        earned = alone_ms * weight * max(1.0, prompts / rows)
        self._debt_ms = max(self._debt_ms + debt_ms - earned, 0.0)
        return charged

    def corrected(self, expected_ms: float, actual_ms: float, charged_share: float) -> None:
        """Corrects the account by the difference between a step's actual and planned duration. Prompts are charged
        `charged_share` of it, the share of the step's stall that `planned` returned. At most twice the expected
        duration is charged to prompts; the rest has other causes on the machine."""
        if self._share == 1.0:
            return
        late_ms = min(actual_ms - expected_ms, expected_ms)
        self._debt_ms = max(self._debt_ms + late_ms * charged_share, 0.0)

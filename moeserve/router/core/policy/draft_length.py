"""Chooses the number of drafts for each request of a step: as many as save more time than they cost.

A draft saves the time of a token without drafts, times the probability that it and all drafts before it are right.
It costs the time of one more row (little while a step is bound by reading weights, much once it computes for many
requests) and the time of drafting; on a GPU also the wait for the host, because steps without drafts are launched
ahead. All are measured: rows by `StepCost`, drafting by the worker, the probability by each request's own recent
drafts.

Drafts of all requests are sorted by value, and as many of the most valuable ones are taken as give the most tokens per
millisecond, or none if none pays. Because texts change, a request without drafts is occasionally tried with one if
right drafts would pay: less and less often while the trials fail. As all this may err, `DraftAccount` bounds what
drafts may lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeserve.router.core.policy.draft_account import MOST_STEPS_READING, DraftAccount, KeepAccount
from moeserve.router.core.policy.step_cost import StepCost
from moeserve.router.core.request import DraftRecord

KEEP = 0.9  # decay of the moving averages per value
PRIOR = 2.0  # weight, in outcomes, of all requests' average beside a request's own
FIRST_GUESS = 0.7  # assumed share of right drafts before any is verified
MARGIN = 1.1  # factor on what drafts cost, as costs and gains are estimates
# Rows with drafts before which one request a step has one draft. As the first of them may be slow once, their drafting
# counts as the least of them, and the account pays at most a step's time for each.
LEARNING = 4
TRIED_EVERY = 64  # after right drafts, one in this many rows without drafts is a trial
TRIED_LEAST = 1024  # the longest interval between trials
NUMBERS = 32  # candidate numbers of drafts compared per step


class DraftLength:
    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._right = PRIOR * FIRST_GUESS  # decaying sums over all requests
        self._wrong = PRIOR * (1.0 - FIRST_GUESS)
        self._draft_ms = 0.0  # milliseconds of drafting per allowed draft
        self._wait_ms = 0.0  # milliseconds that a GPU waits for the host in a step with drafts
        self._num_observed = 0
        self._num_timed = 0  # steps of which the time of drafting is known
        self._account = DraftAccount()
        self._reading = DraftAccount(MOST_STEPS_READING, -math.inf)  # of texts, by a drafting model
        self._keeping = KeepAccount()
        self._has_read = False  # whether a drafting model has spent time on reading
        self._num_kept = 1  # steps since the block follows the texts
        self._idle = 0.0  # rows without drafts since the last trial
        self._tried_every = TRIED_EVERY  # interval between trials, in such rows

    @property
    def keeps_block(self) -> bool:
        """True if the model's own block keeps up with the texts: StepPlan.keeps_block."""
        return self._keeping.allows

    def choose(
        self, records: Sequence[DraftRecord], context: int, most: int, budget: int
    ) -> tuple[list[int], float]:
        """Returns how many drafts each request with a row in the next step may have (at most `most` each, `budget` in
        all), and the number of drafts that the worker is expected to make in all. While drafts do not pay, all are 0
        but for trials, the first observed drafts, and texts that are being read. Before any step is measured, each
        request may have `most`. context: positions that the rows attend to."""
        if not records or min(most, budget) <= 0:
            return [0] * len(records), 0.0
        without = self._cost.decode_ms(len(records), context)
        if without <= 0.0:  # nothing was measured
            return [most] * len(records), sum(record.made for record in records) * most
        lengths = [0] * len(records)
        if not self._is_kept():
            self._idle += len(records)  # so that a trial comes when the block follows again
            return lengths, 0.0
        if not self._account.allows:
            return lengths, 0.0
        able = self._able(records)
        if not able:
            return lengths, 0.0
        if self._num_observed < LEARNING:
            lengths[able[0]] = 1
            return lengths, records[able[0]].made
        expected = 0.0
        for _, at in self._worthwhile(records, able, context, most, budget, without):
            lengths[at] += 1
            expected += records[at].made
        for at in able:  # a text that is begun is read to its end
            if records[at].is_read is False and not lengths[at] and sum(lengths) < budget:
                lengths[at] = 1
        for length, record in zip(lengths, records, strict=True):
            record.idle = 0 if length else record.idle + 1
        longest = max(able, key=lambda at: records[at].idle)
        # A trial also delays the rows beside it, if the step waits for drafting.
        rows = len(records)
        trial_ms = self._cost_ms(rows, 1, 1, context, without)
        patience = max(rows * trial_ms / without, 1.0)
        if self._is_time_to_try(lengths, budget, patience) and self._could_pay(rows, context, most, without):
            lengths[longest], records[longest].idle, records[longest].is_trial = 1, 0, True
            expected += records[longest].made
        return lengths, expected

    def observe(self, record: DraftRecord, allowed: int, drafted: int, accepted: int) -> None:
        """Records the outcome of a row that was allowed `allowed` > 0 drafts. drafted: number of its drafts that the
        step verified; drafts after a stop token or a late mask are not verified and do not count."""
        record.made = KEEP * record.made + (1.0 - KEEP) * drafted / allowed
        if record.is_trial:
            record.is_trial = False
            self._tried_every = TRIED_EVERY if accepted else min(2 * self._tried_every, TRIED_LEAST)
            if accepted:  # another trial at once: one right draft says little, and the block may leave soon
                self._idle = math.inf
        if not drafted:
            return
        self._num_observed += 1
        is_wrong = float(accepted < drafted)
        record.right = KEEP * record.right + accepted
        record.wrong = KEEP * record.wrong + is_wrong
        # Requests that stopped drafting add nothing here: the average represents requests that start to draft.
        self._right = KEEP * self._right + accepted
        self._wrong = KEEP * self._wrong + is_wrong

    def finished(
        self, rows: int, drafted: int, accepted: int, context: int, ms: float, read_ms: float = 0.0
    ) -> None:
        """Records a step with `rows` decode rows, for the accounts. drafted, accepted: its drafts, and how many of them
        were right. ms: additional time for drafting and waiting for the host. read_ms: additional time in which a
        drafting model read texts. The step's own duration must have been observed before."""
        without = self._cost.decode_ms(rows, context)
        if not rows or without <= 0.0:
            return
        added = self._cost.decode_ms(rows + drafted, context) - without + ms
        lost = added - accepted * without / rows
        if self._num_observed <= LEARNING:
            lost = min(lost, without)
        self._has_read = self._has_read or read_ms > 0.0
        self._account.passed(rows, without, lost)
        self._reading.passed(rows, without, read_ms + min(lost, 0.0))
        self._keeping.gained(max(-lost, 0.0))

    def kept(self, ms: float, keep_ms: float) -> None:
        """Records a step of `ms` milliseconds in which the next-token block took `keep_ms` milliseconds to keep up with
        the texts."""
        self._keeping.passed(ms, keep_ms)

    def observe_time(self, allowed: int, draft_ms: float, wait_ms: float = 0.0) -> None:
        """Learns what drafts cost besides their rows. draft_ms: milliseconds that the worker spent on
        drafting for rows with `allowed` drafts in total. wait_ms: milliseconds in which a GPU waited for the
        host because of drafts."""
        each = draft_ms / allowed
        self._num_timed += 1
        if self._num_timed == 1:
            self._draft_ms, self._wait_ms = each, wait_ms
        elif self._num_timed <= LEARNING:
            self._draft_ms, self._wait_ms = min(self._draft_ms, each), min(self._wait_ms, wait_ms)
        else:
            self._draft_ms = KEEP * self._draft_ms + (1.0 - KEEP) * each
            self._wait_ms = KEEP * self._wait_ms + (1.0 - KEEP) * wait_ms

    def _is_kept(self) -> bool:
        """Returns whether the block can draft for the next step: it follows the texts, and did so in the step before.
        Else nothing is drafted: a GPU would wait for drafts that do not come. Look-up waits, too: what it gains would
        have let the block go on."""
        self._num_kept = self._num_kept + 1 if self._keeping.allows else 0
        return self._num_kept > 1

    def _is_time_to_try(self, lengths: Sequence[int], budget: int, patience: float) -> bool:
        """Returns whether a request without drafts is to be tried with one. patience: the time between two
        trials, as a multiple of the usual interval."""
        idle = sum(length == 0 for length in lengths)
        self._idle += idle
        if not idle or self._idle < patience * self._tried_every or sum(lengths) >= budget:
            return False
        self._idle = 0.0
        return True

    def _probability(self, record: DraftRecord) -> float:
        """Returns the probability that the request's next draft is right, given that those before it are."""
        right, wrong = PRIOR * self._right, PRIOR * self._wrong
        share = PRIOR / max(right + wrong, 1e-9)
        right, wrong = record.right + share * right, record.wrong + share * wrong
        return right / (right + wrong)

    def _able(self, records: Sequence[DraftRecord]) -> list[int]:
        """Returns the indices of the requests that may have drafts. Where a drafting model must read texts, at most one
        request of a step is begun, and none while that is not paid for."""
        if not self._has_read:
            return list(range(len(records)))
        able = [at for at, record in enumerate(records) if record.is_read is not None]
        if self._reading.allows and len(able) < len(records):
            able.append(next(at for at, record in enumerate(records) if record.is_read is None))
        return able

    def _worthwhile(
        self,
        records: Sequence[DraftRecord],
        able: Sequence[int],
        context: int,
        most: int,
        budget: int,
        without: float,
    ) -> list[tuple[float, int]]:
        """Returns the step's candidate drafts, as (expected tokens gained, index of the request). able: the requests
        that may have some."""
        every: list[tuple[float, int]] = []
        for at in able:
            record = records[at]
            probability, tokens = self._probability(record), record.made
            for _ in range(most):
                tokens *= probability
                every.append((tokens, at))
        every.sort(key=lambda draft: -draft[0])
        del every[budget:]
        if not self._pay_without_rows(every, without / len(records)):
            return []
        return every[: self._best_number(every, records, context, without)]

    def _pay_without_rows(self, every: Sequence[tuple[float, int]], token_ms: float) -> bool:
        """Returns whether some number of drafts would pay if their rows took no time: `_best_number` is slow."""
        tokens = 0.0
        for number, (worth, _) in enumerate(every, 1):
            tokens += worth
            if tokens * token_ms > MARGIN * (self._draft_ms * number + self._wait_ms):
                return True
        return False

    def _best_number(
        self, every: Sequence[tuple[float, int]], records: Sequence[DraftRecord], context: int, without: float
    ) -> int:
        """Returns the number of drafts with which a step yields the most tokens per millisecond; 0 if none has more
        than the step without drafts. What drafts save is not compared with what each costs: with many right drafts
        the time per token falls to hardly more than a row's, and all of them would seem to save nothing."""
        rows, made, tokens = len(records), 0.0, 0.0
        best, fastest = 0, rows / without
        interval = max(len(every) // NUMBERS, 1)
        for number, (worth, at) in enumerate(every, 1):
            tokens += worth
            made += records[at].made
            if number % interval and number != len(every):
                continue
            more = MARGIN * self._cost_ms(rows, made, number, context, without)
            if (rows + tokens) / (without + more) > fastest:
                best, fastest = number, (rows + tokens) / (without + more)
        return best

    def _cost_ms(self, rows: int, made: float, allowed: int, context: int, without: float) -> float:
        """Returns the milliseconds that drafts add to a step: for `made` more rows, for drafting `allowed` ones, and
        for waiting."""
        more = self._cost.decode_ms(rows + made, context) - without
        return more + self._draft_ms * allowed + self._wait_ms

    def _could_pay(self, rows: int, context: int, most: int, without: float) -> bool:
        """Returns whether drafts would pay if they were always right."""
        token_ms = without / rows
        for drafts in {1, most}:
            more = self._cost_ms(rows, drafts, drafts, context, without)
            if drafts * token_ms > MARGIN * more:
                return True
        return False

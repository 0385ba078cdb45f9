"""How many drafts each request of a step may have: as many as bring more than they cost.

A draft is worth a token's time without drafts, times the probability that it is right and that those before it are. It
costs the time of one more row, little while a step waits for weights, much once it computes for many requests; and the
time that drafting takes, on a GPU with the host's time that it waits for: steps without drafts are launched ahead. Each
is measured: rows by `StepCost`, drafting by the worker, how often drafts are right by each request's own last ones.

Drafts are ordered by worth over all requests. Of all numbers of the worthiest ones, the best is taken; none, where none
pays. Of the requests without drafts one is tried now and then, if right drafts would pay, because texts change: less
and less often while that draft is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.router.core.policy.step_cost import StepCost
from moeserve.router.core.request import DraftRecord

KEEP = 0.9  # of a moving average, beside a new value
PRIOR = 2.0  # outcomes that all requests' average counts for, beside a request's own
FIRST_GUESS = 0.7  # of drafts that are right, before any was verified
MARGIN = 1.1  # that drafts must be worth more than their cost, as both are estimates
LEARNING = 4  # rows with drafts, before which all may have some
TRIED_EVERY = 64  # rows without drafts, one of which is tried; after right drafts
TRIED_LEAST = 1024  # and at most
NUMBERS = 32  # of drafts in a step that are compared


class DraftLength:
    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._right = FIRST_GUESS  # moving averages over all requests
        self._wrong = 1.0 - FIRST_GUESS
        self._draft_ms = 0.0  # that the worker takes to draft, for each draft that rows may have
        self._wait_ms = 0.0  # that a GPU waits for the host, in a step with any drafts
        self._num_observed = 0
        self._idle = 0  # rows without drafts, since one was tried
        self._tried_every = TRIED_EVERY  # of these

    def choose(
        self, records: Sequence[DraftRecord], context: int, most: int, budget: int
    ) -> tuple[list[int], float]:
        """How many drafts each of these requests, which the next step has a row of, may have: up to `most`, and
        `budget` in all. And how many of them the worker will make, as expected. context: positions that the rows attend
        to."""
        if not records or min(most, budget) <= 0:
            return [0] * len(records), 0.0
        without = self._cost.decode_ms(len(records), context)
        if self._num_observed < LEARNING or without <= 0.0:
            return [most] * len(records), sum(record.made for record in records) * most
        lengths = [0] * len(records)
        expected = 0.0
        for _, at in self._worthwhile(records, context, most, budget, without):
            lengths[at] += 1
            expected += records[at].made
        for length, record in zip(lengths, records, strict=True):
            record.idle = 0 if length else record.idle + 1
            record.is_trial = False
        longest = max(range(len(records)), key=lambda at: records[at].idle)
        # A trial costs the rows beside it as much as its own, where the step waits for it.
        rows = len(records)
        trial_ms = self._cost_ms(rows, 1, 1, context, without)
        patience = max(rows * trial_ms / without, 1.0)
        if self._is_time_to_try(lengths, budget, patience) and self._could_pay(rows, context, most, without):
            lengths[longest], records[longest].idle, records[longest].is_trial = 1, 0, True
            expected += records[longest].made
        return lengths, expected

    def observe(self, record: DraftRecord, allowed: int, drafted: int, accepted: int) -> None:
        """What became of a row that might have `allowed` drafts, more than none. drafted: without those behind a stop
        token or a late mask, which were not looked at."""
        record.made = KEEP * record.made + (1.0 - KEEP) * drafted / allowed
        if record.is_trial:
            self._tried_every = TRIED_EVERY if accepted else min(2 * self._tried_every, TRIED_LEAST)
        if not drafted:
            return
        self._num_observed += 1
        is_wrong = float(accepted < drafted)
        record.right = KEEP * record.right + accepted
        record.wrong = KEEP * record.wrong + is_wrong
        # Of requests that do not draft any more, nothing is seen here: the average follows those that begin.
        self._right = KEEP * self._right + (1.0 - KEEP) * accepted
        self._wrong = KEEP * self._wrong + (1.0 - KEEP) * is_wrong

    def observe_time(self, allowed: int, draft_ms: float, wait_ms: float = 0.0) -> None:
        """draft_ms: milliseconds that the worker took to draft, for rows that might have `allowed` drafts together;
        wait_ms: that a GPU waited for the host."""
        each = draft_ms / allowed
        kept = KEEP if self._draft_ms else 0.0
        self._draft_ms = kept * self._draft_ms + (1.0 - kept) * each
        kept = KEEP if self._wait_ms else 0.0
        self._wait_ms = kept * self._wait_ms + (1.0 - kept) * wait_ms

    def _is_time_to_try(self, lengths: Sequence[int], budget: int, patience: float) -> bool:
        """patience: how much longer than the usual number of rows to wait."""
        idle = sum(length == 0 for length in lengths)
        self._idle += idle
        if not idle or self._idle < patience * self._tried_every or sum(lengths) >= budget:
            return False
        self._idle = 0
        return True

    def _probability(self, record: DraftRecord) -> float:
        """That the request's next draft is right, if those before it are."""
        right, wrong = PRIOR * self._right, PRIOR * self._wrong
        share = PRIOR / max(right + wrong, 1e-9)
        right, wrong = record.right + share * right, record.wrong + share * wrong
        return right / (right + wrong)

    def _worthwhile(
        self, records: Sequence[DraftRecord], context: int, most: int, budget: int, without: float
    ) -> list[tuple[float, int]]:
        """The drafts that the step should have: tokens that each is expected to bring, and whose it is."""
        every: list[tuple[float, int]] = []
        for at, record in enumerate(records):
            probability, tokens = self._probability(record), record.made
            for _ in range(most):
                tokens *= probability
                every.append((tokens, at))
        every.sort(key=lambda draft: -draft[0])
        del every[budget:]
        # A token's time at the best speed so far, by which the next best number is found.
        each = without / len(records)
        best = 0
        for _ in range(2):
            best, each = self._best_number(every, records, context, without, each)
        return every[:best]

    def _best_number(
        self,
        every: Sequence[tuple[float, int]],
        records: Sequence[DraftRecord],
        context: int,
        without: float,
        token_ms: float,
    ) -> tuple[int, float]:
        """How many of the drafts to have, and the milliseconds of a token then."""
        rows, made, tokens = len(records), 0.0, 0.0
        best, profit, best_ms = 0, 0.0, without / rows
        interval = max(len(every) // NUMBERS, 1)
        for number, (worth, at) in enumerate(every, 1):
            tokens += worth
            made += records[at].made
            if number % interval and number != len(every):
                continue
            more = self._cost_ms(rows, made, number, context, without)
            if tokens * token_ms - MARGIN * more > profit:
                profit = tokens * token_ms - MARGIN * more
                best, best_ms = number, (without + more) / (rows + tokens)
        return best, best_ms

    def _cost_ms(self, rows: int, made: float, allowed: int, context: int, without: float) -> float:
        """What drafts add to a step: of `made` rows more, of drafting where `allowed` are asked for, and of waiting."""
        more = self._cost.decode_ms(rows + made, context) - without
        return more + self._draft_ms * allowed + self._wait_ms

    def _could_pay(self, rows: int, context: int, most: int, without: float) -> bool:
        """Whether drafts would pay that are always right."""
        token_ms = without / rows
        for drafts in {1, most}:
            more = self._cost_ms(rows, drafts, drafts, context, without)
            if drafts * token_ms > MARGIN * more:
                return True
        return False

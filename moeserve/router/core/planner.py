"""Plans one step: preempts and binds requests, and chooses the step's rows. The order matters:

1. preemption: a victim's KV slots go to other rows of the same step, so it must have no row in it;
2. a row for every decoding request, except for some with costly grammars (`grammar_turns.py`);
3. chunks of prompts in fair order. A waiting request is bound when its turn comes. The token limit, the KV slots and
   the prefill budget (`pace.py`) bound them.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.steps import Sampled, StepResult
from moeserve.router.core.batch.running_batch import RunningBatch
from moeserve.router.core.batch.waiting_queue import WaitingQueue
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.policy.background_share import BackgroundShare
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.router.core.policy.fair_share import FairShare
from moeserve.router.core.policy.grammar_turns import GrammarTurns
from moeserve.router.core.policy.pace import LEAST_CHUNK, Pace
from moeserve.router.core.policy.preemption import Preemption
from moeserve.router.core.policy.prompt_order import PromptOrder
from moeserve.router.core.policy.step_cost import StepCost
from moeserve.router.core.request import Request, State
from moeserve.router.core.steps.drafted_runs import add_draft_rows
from moeserve.router.core.steps.scheduled_step import ScheduledStep


class Planner:
    def __init__(
        self,
        limits: Limits,
        memory: SequenceMemory,
        waiting: WaitingQueue,
        batch: RunningBatch,
        shares: FairShare,
        cost: StepCost,
        turns: GrammarTurns,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._waiting = waiting
        self._batch = batch
        self._preemption = Preemption(batch, memory)
        self._shares = shares
        self._cost = cost
        self._turns = turns
        self._drafts = DraftLength(cost)
        self._pace = Pace(cost, limits.max_itl_ms, limits.prefill_share, streams=limits.streams_prompts)
        self.beside_tower = self._pace.beside_tower
        self._order = PromptOrder(waiting, shares)
        self.background = BackgroundShare()  # Scheduler notes which requests are open
        memory.price_with(self._recompute_ms)

    def plan(self, step: int, now: float, *, results_awaited: bool) -> ScheduledStep | None:
        """Returns the next step; None if there is nothing to do now. now: seconds. The step has no rows if only a
        tier has work."""
        memory = self._memory
        if not memory.is_synced:
            return None if results_awaited else ScheduledStep(step)
        memory.begin_step(now, beside_decoding=bool(self._batch.decoding))
        scheduled = self._plan_step(step, now, results_awaited=results_awaited or memory.is_loading)
        pages = memory.end_step(now)
        if scheduled is None and (pages is not None or (memory.has_work and not results_awaited)):
            scheduled = ScheduledStep(step)
        if scheduled is not None:
            scheduled.pages, scheduled.state_copies = pages, memory.take_copies()
            scheduled.keeps_block = self._drafts.keeps_block
        return scheduled

    def _plan_step(self, step: int, now: float, *, results_awaited: bool) -> ScheduledStep | None:
        while True:
            has_turn = self.background.has_turn
            scheduled = self._plan_rows(step, now, background=has_turn)
            if not scheduled.rows and not has_turn and not results_awaited:
                scheduled = self._plan_rows(step, now, background=True)  # the others cannot use the step
            if scheduled.rows:
                self._charge_background(scheduled)
                return scheduled
            if results_awaited or not self._batch.prefilling or not self._preemption.break_deadlock():
                return None

    def _recompute_ms(self, start: int, count: int) -> float:
        return self._cost.recompute_ms(start, count, self._limits.max_num_batched_tokens)

    def finished(self, scheduled: ScheduledStep, result: StepResult) -> None:
        """Learns from a finished step: its duration on the worker, and the outcome of its drafts."""
        # A step that compiled kernels is not representative.
        of_drafts = result.draft_ms + result.draft_wait_ms + result.draft_read_ms + result.draft_keep_ms
        ms = 0.0 if result.kernels_compiled else result.compute_ms - of_drafts
        allowed = self._observe_drafts(scheduled, result) if scheduled.draft_tokens else 0
        if allowed and not result.kernels_compiled:
            self._drafts.observe_time(allowed, result.draft_ms, result.draft_wait_ms)
        if scheduled.prompt_tokens and scheduled.num_decode and ms > 0.0:
            self._pace.corrected(scheduled.expected_ms, ms, scheduled.charged_share)
        if scheduled.has_background and ms > 0.0:
            self.background.corrected(scheduled.expected_ms, ms)
        self._cost.observe(scheduled.shape, ms, has_drafts=scheduled.num_drafted > 0)
        if self._limits.max_drafts and not result.kernels_compiled:
            made = [entry.accepted for entry in result.sampled if entry.accepted is not None]
            drafted, right = sum(one.drafted for one in made), sum(len(one.token_ids) for one in made)
            rows, context = scheduled.num_decode, scheduled.shape.decode_context
            drafting_ms = result.draft_ms + result.draft_wait_ms
            self._drafts.finished(rows, drafted, right, context, drafting_ms, result.draft_read_ms)
            self._drafts.kept(ms, result.draft_keep_ms)

    def _observe_drafts(self, scheduled: ScheduledStep, result: StepResult) -> int:
        """Returns the number of drafts that were allowed for texts that are read."""
        rows = zip(scheduled.owners, scheduled.rows, result.sampled[: scheduled.num_draft_rows], strict=False)
        allowed = 0
        for index, (request, row, entry) in enumerate(rows):
            if row.count == 1:
                continue
            record, drafts = request.draft_record, row.count - 1
            record.is_read = index not in result.lagging_rows
            if record.is_read:
                self._drafts.observe(record, drafts, *_outcome(entry))
                allowed += drafts
        return allowed

    def _plan_rows(self, step: int, now: float, *, background: bool) -> ScheduledStep:
        """Plans the step's rows. background: whether rows of background requests may be among them."""
        scheduled = ScheduledStep(step)
        self._memory.begin_rows()
        self._batch.retry_postponed()
        self._preempt_for_others()
        self._preempt_for_fairness()
        self._preemption.for_decode_slots()
        self._plan_decode_rows(scheduled, background)
        self._plan_prompts(scheduled, now, background)
        return scheduled

    def _charge_background(self, scheduled: ScheduledStep) -> None:
        others = scheduled.shape_of_others
        scheduled.has_background = others != scheduled.shape
        others_ms = self._cost.predict(others)
        blocks_others = scheduled.has_background and bool(others.rows or others.prompt)
        self.background.planned(others_ms, scheduled.expected_ms - others_ms if blocks_others else 0.0)

    def _preempt_for_others(self) -> None:
        """Preempts background requests so that the next other request fits."""
        if self.background.is_mixed and self._waiting.num_others:
            head = self._order.next((), with_waiting=True, with_background=False)
            assert head is not None
            self._preemption.for_others(head)

    def _preempt_for_fairness(self) -> None:
        """Preempts requests so that the least served tenant's next request fits, if there are several tenants."""
        if self._shares.num_tenants > 1 and len(self._waiting):
            head = self._order.next((), with_waiting=True)
            assert head is not None
            self._preemption.for_fairness(head)

    def _plan_decode_rows(self, scheduled: ScheduledStep, background: bool) -> None:
        decoding = list(self._batch.decoding.values())
        searching = list(self._batch.searching.values())
        if self.background.is_mixed:
            others = [request for request in decoding if not request.is_background]
            searching = [request for request in searching if background or not request.is_background]
            decoding = [*others, *(one for one in decoding if one.is_background)] if background else others
        if self._limits.max_drafts:
            ended = self._add_draft_rows(scheduled, self._turns.select(decoding))
        else:
            rows = self._turns.select(decoding[: self._memory.available])
            ended = scheduled.add_decode_rows(rows, self._memory)
        for request in ended:
            self._batch.planned(request)
        for request in searching:
            if 0 < request.num_beams_due <= self._memory.available:
                scheduled.add_beam_rows(request, self._memory)
        self._shares.charge_rows(scheduled.owners)

    def _add_draft_rows(self, scheduled: ScheduledStep, requests: Sequence[Request]) -> list[Request]:
        """Adds rows with drafts. Drafts take at most half of the tokens that decode rows leave in the step; prompts
        get the rest."""
        budget = (self._limits.step_tokens(1) - self._batch.num_rows) // 2
        context = sum(request.num_planned for request in requests)
        records = [request.draft_record for request in requests]
        lengths, expected = self._drafts.choose(records, context, self._limits.max_drafts, budget)
        ended = add_draft_rows(scheduled, requests, self._memory, lengths, budget)
        # Some requests may get no drafts for lack of slots.
        scheduled.num_drafted = min(round(expected), scheduled.draft_tokens)
        return ended

    def _plan_prompts(self, scheduled: ScheduledStep, now: float, background: bool) -> None:
        """Adds chunks of prompts, each as large as the rest of the step allows. background: also of background
        requests."""
        rows = scheduled.num_decode
        alone_ms = self._cost.predict(scheduled.shape)
        scheduled.expected_ms = alone_ms
        batch = self._batch
        under_way, waiting = len(batch.prefilling), len(self._waiting)
        if not background:
            under_way, waiting = _num_others(batch.prefilling), self._waiting.num_others
        prompts = under_way + min(waiting, batch.num_free_req_slots)
        if not prompts:
            self._pace.planned(rows, alone_ms, 0.0, 0.0, 0)
            return
        protected_share = self._protected_share(scheduled)
        budget_ms = self._pace.prefill_budget_ms(rows, alone_ms, protected_share)
        short_ms = 0.0
        while (
            self._has_room(scheduled, budget_ms)
            and (request := self._next_prompt(scheduled, now, background, alone_ms)) is not None
        ):
            count = min(self._chunk(scheduled, request, budget_ms), request.until_snapshot_point)
            if self._limits.whole_spans:
                count = request.without_cut_spans(count, self._most(scheduled, request))
            if count == 0:
                break
            if count == request.until_snapshot_point < request.prompt_left:
                scheduled.at_snapshot_point.add(request)
            self._order.served(request, count, batch.prefilling)
            scheduled.add_chunk(request, count, self._memory, now)
            self._memory.publish(request)
            batch.planned(request)
            before, scheduled.expected_ms = scheduled.expected_ms, self._cost.predict(scheduled.shape)
            chunk_ms = scheduled.expected_ms - before
            budget_ms -= chunk_ms
            short_ms += chunk_ms if request.is_short else 0.0
            if request.state is not State.PREFILL:  # its first token must not wait for other long prompts
                spent = scheduled.expected_ms - alone_ms
                budget_ms = min(budget_ms, self._pace.stall_ms(rows, alone_ms, 1.0) - spent)
        streams = self._limits.streams_prompts and scheduled.prompt_tokens
        next_ms = self._next_chunk_ms(rows) if streams else None
        stall_ms = scheduled.expected_ms - alone_ms
        scheduled.charged_share = self._pace.planned(
            rows, alone_ms, stall_ms, protected_share, prompts, next_ms, short_ms
        )

    def _next_chunk_ms(self, rows: int) -> float:
        """Returns how long, in ms, the next chunk of the running prompts will stall `rows` decode rows; 0 if no
        prompt is left."""
        left, start = 0, 0
        for request in self._batch.prefilling:
            left, start = left + request.prompt_left, max(start, len(request.slots))
        count = min(left, self._limits.step_tokens(rows) - rows)
        return self._cost.chunk_ms(rows, start, count, span=0)

    def _has_room(self, scheduled: ScheduledStep, budget_ms: float) -> bool:
        """Returns whether one more prompt token fits. A step's first chunk always fits; see LEAST_CHUNK."""
        planned = scheduled.num_tokens
        if planned == self._limits.step_tokens(scheduled.num_decode) or not self._memory.available:
            return False
        if not scheduled.prompt_tokens:
            return budget_ms > 0.0
        return self._cost.chunk_ms(planned, 0, 1, span=scheduled.prompt_span) <= budget_ms

    def _protected_share(self, scheduled: ScheduledStep) -> float:
        """Returns the share of the decode rows that the next prompt must not slow down; see
        `FairShare.protected_share`."""
        if not scheduled.num_decode:
            return 0.0
        if self._shares.num_tenants == 1:
            return 1.0
        first = self._order.next(self._batch.prefilling, with_waiting=self._batch.num_free_req_slots > 0)
        return 1.0 if first is None else self._shares.protected_share(scheduled.owners, first.tenant)

    def _next_prompt(
        self, scheduled: ScheduledStep, now: float, background: bool, alone_ms: float
    ) -> Request | None:
        """Returns the request whose chunk is next, after binding it if it was waiting. background: it may be a
        background request. alone_ms: duration of the step's decode rows. If the next waiting request cannot be bound
        yet, no other waiting request overtakes it; otherwise smaller ones would take every freed slot forever. The same
        holds for a request that awaits a snapshot of a running prompt, but not for one being loaded from a tier."""
        batch = self._batch
        under_way = batch.prefilling
        if scheduled.at_snapshot_point:
            under_way = [request for request in under_way if request not in scheduled.at_snapshot_point]
        while True:
            request = self._order.next(
                under_way, with_waiting=batch.num_free_req_slots > 0, with_background=background
            )
            if request is None or request.state is State.PREFILL:
                return request
            if not batch.may_bind(request) or self._memory.awaits_snapshot(request, batch.prefilling):
                return self._order.next(under_way, with_waiting=False, with_background=background)
            if not batch.begin_load(request, now):
                batch.bind(request)
                left_ms = self._cost.chunk_ms(0, len(request.slots), request.prompt_left, span=0)
                # A long prompt stays one when it is bound again after a preemption, with most of it cached.
                request.is_short = request.is_short and self._pace.is_short(left_ms, alone_ms)
                return request

    def _chunk(self, scheduled: ScheduledStep, request: Request, budget_ms: float) -> int:
        """Returns how many tokens of the request's prompt fit into the step."""
        planned = scheduled.num_tokens
        fits = most = self._most(scheduled, request)
        if scheduled.num_decode:
            fits = max(min(fits, self._cost.largest_trial - scheduled.prompt_tokens), 0)
        span = scheduled.prompt_span
        fits = self._cost.largest_chunk(planned, len(request.slots), fits, budget_ms, span=span)
        return fits if fits or scheduled.prompt_tokens else min(most, LEAST_CHUNK)

    def _most(self, scheduled: ScheduledStep, request: Request) -> int:
        """Returns how many tokens of the prompt fit, whatever they cost; otherwise like `_chunk`."""
        room = self._limits.step_tokens(scheduled.num_decode) - scheduled.num_tokens
        return min(request.prompt_left, room, self._memory.available)


def _num_others(requests: Sequence[Request]) -> int:
    return sum(not request.is_background for request in requests)


def _outcome(entry: Sampled) -> tuple[int, int]:
    """Returns how many of a row's drafts count as tried (verified, or after a wrong one), and how many were right."""
    accepted = entry.accepted
    if accepted is None:
        return 0, 0
    right = len(accepted.token_ids)
    return (right if accepted.cut_short else accepted.drafted), right

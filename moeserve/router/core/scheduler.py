"""The scheduler: takes events, returns step plans and messages. It reads no clock and owns no socket.

The caller passes it events as they arrive (`add`, `abort`, `stop_hit`, `step_result`, `close`), calls `plan` until it
returns None, and sends the messages of `take_messages` to the detokenizer. This file has the events and messages;
`planner.py` plans one step, and `running_batch.py` binds, preempts and releases requests.

Two plans may be in flight: N+1 is built while the worker runs N, without knowing N's tokens. A decode row stands for
the token that the worker sampled last. A request that ends or is preempted in between leaves at most one stale row in
N+1, whose result is ignored. That row is harmless even if the request's KV slots are reused in N+2: **the worker
executes plans strictly in order**, so it writes before the new owner, who reads only its own KV or the cache's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from moeserve.messages.kv_events import KvEvent
from moeserve.messages.refusal import Refusal
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.sampling import FinishReason, TokenLogprob
from moeserve.messages.schema import (
    DetokenizeEnd,
    DetokenizeStart,
    GenerateRequest,
    RequestError,
    StopHit,
    TokensItem,
)
from moeserve.messages.steps import MeasuredStep, Sampled, StepPlan, StepResult
from moeserve.router.core.batch.beam_searches import BeamSearches
from moeserve.router.core.batch.running_batch import RunningBatch
from moeserve.router.core.batch.waiting_queue import WaitingQueue
from moeserve.router.core.kv_memory import KvMemory
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.planner import Planner
from moeserve.router.core.policy.back_pressure import BackPressure
from moeserve.router.core.policy.crash_blame import CrashBlame
from moeserve.router.core.policy.fair_share import FairShare
from moeserve.router.core.policy.grammar_turns import GrammarTurns
from moeserve.router.core.policy.step_cost import StepCost
from moeserve.router.core.request import Request, State
from moeserve.router.core.router_stats import load_report, observe_step
from moeserve.router.core.steps.decoded_rows import accept_rows
from moeserve.router.core.steps.drafted_runs import Ended, accept_runs, settle
from moeserve.router.core.steps.outbox import Outbox, RouterMessage
from moeserve.router.core.steps.plans_in_flight import PlansInFlight
from moeserve.router.core.steps.sent_grammars import SentGrammars

NOT_FINITE = "the model produced non-finite logits for this request"


class Scheduler:
    """Owns every open request, every KV slot and the prefix tree. Times are seconds of the caller's clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._closed: str | None = None  # the cause, after `close`
        self._has_worker = True
        self._open: dict[int, Request] = {}  # id → request that still owes its final message
        self._adapters = Counter[str]()  # open requests per adapter, except those without one
        self._grammars = SentGrammars()
        self._totals = LoadReport()
        self._waiting = WaitingQueue()
        self._memory: SequenceMemory = KvMemory(limits, self._totals)
        self._batch = RunningBatch(limits, self._memory, self._waiting, self._totals)
        self._history = self._batch.admission.history
        self._blame = CrashBlame()
        self._shares = FairShare()
        self._cost = StepCost(limits.num_experts, limits.experts_per_token)
        self._turns = GrammarTurns()
        self._planner = Planner(
            limits, self._memory, self._waiting, self._batch, self._shares, self._cost, self._turns
        )
        self.beside_tower = self._planner.beside_tower  # see `Pace`
        self._pressure = BackPressure(
            limits, self._waiting, self._batch.running, self._cost, self._history, self._batch.postponed
        )
        self._in_flight = PlansInFlight()
        self._out = Outbox()
        self._searches = BeamSearches(self._memory, self._totals)

    def learn(self, measured: list[MeasuredStep]) -> None:
        """Initialises the cost model with steps that the worker measured at its start."""
        self._cost.learn(measured)

    # ---------------------------------------------------------------- events

    def add(self, message: GenerateRequest) -> None:
        """Queues a request, or answers it with a RequestError: 400 if it can never run, 503 if the queue is full or
        the scheduler is closed. Raises ValueError if the id is open already."""
        if self._searches.request_id(message.id) in self._open:
            raise ValueError(f"request id {message.id} is in use")
        messages = [message]
        if message.beams is not None and not message.spans and self._closed is None:
            messages = self._searches.gather(message)
            if not messages:
                return
        if (refusal := self._refusal(messages[0])) is not None:
            self._out.put(replace(refusal, id=message.id) for message in messages)
            self._batch.leave_spans(message.spans)
            return
        request = Request(messages[0])
        if request.beams is not None:
            self._searches.began(request, messages)
        self._open[request.id] = request
        if request.adapter:
            self._adapters[request.adapter] += 1
        self._grammars.joined(request.sampling.grammar)
        self._shares.joined(request.tenant)
        self._planner.background.joined(request)
        self._batch.join(request)
        for message in messages:
            output = b"" if message.resumed is None else message.resumed.token_ids
            self._out.put([DetokenizeStart(message.id, message.text, message.context, output)])

    def _refusal(self, message: GenerateRequest) -> RequestError | None:
        if self._closed is not None:
            return RequestError(message.id, 503, self._closed, refusal=Refusal.SHUTTING_DOWN)
        never = self.limits.refusal(message)
        if never is not None or message.resumed is not None:  # a resumed request was accepted before
            return never
        return self._pressure.refusal(message, self._shares.num_tenants_with(message.key_name))

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its resources at once. An id that is not open (finished, aborted, unknown) is
        ignored, because an abort and the final message may cross."""
        request = self._open.get(self._searches.request_id(request_id))
        if request is None:
            self._searches.forget(request_id)
            return
        ids = request.answer_ids
        self._release(request)
        self._totals.aborts += 1
        self._out.put(DetokenizeEnd(id=one) for one in ids)

    def abort_before(self, first_id: int) -> None:
        """Aborts all open requests with smaller ids."""
        for request_id in [request_id for request_id in self._open if request_id < first_id]:
            self.abort(request_id)

    def adapters_in_use(self) -> list[str]:
        """Returns the keys of open requests' adapters."""
        return list(self._adapters)

    def adapter_lost(self, key: str, cause: str) -> None:
        """Fails the requests that use this adapter. Call it only while no plan is in flight."""
        for request in [request for request in self._open.values() if request.adapter == key]:
            self._fail(request, 500, cause)

    def stop_hit(self, hit: StopHit) -> None:
        """Ends a request at a stop string; tokens sampled after it do not count. As in `abort`, an id that is not
        open is ignored: its final message has been sent."""
        request = self._open.get(hit.id)
        if request is not None:
            completion_tokens = min(hit.num_tokens, request.num_output)
            self._history.add(completion_tokens)
            self._finish(request, "stop", completion_tokens, now=request.last_token_at)

    def step_result(self, result: StepResult, now: float) -> None:
        """Takes the oldest plan's result. Raises ProtocolError if it is another's. now: monotonic seconds."""
        scheduled = self._in_flight.answered(result)
        self._batch.last_finished = scheduled.step
        self._batch.end_loads(self._memory.take_report(result.pages, now))
        if not scheduled.rows:
            return
        settle(scheduled, result.sampled)
        self._planner.finished(scheduled, result)
        observe_step(self._totals, scheduled, result)
        for index, cause in result.failed_rows.items():
            if (owner := scheduled.owners[index]).state is not State.FINISHED:
                self._fail(owner, 500, cause, forget=True)
        late = [index for index in range(len(scheduled.sampling)) if result.sampled[index].late]
        self._turns.observe(scheduled.sampling, result.mask_ms, result.compute_ms, late)
        for index, logprobs in result.prompt_logprobs.items():
            self._out.emit_prompt_logprobs(scheduled.owners[index], scheduled.rows[index].start, logprobs)
        self._out.emit_progress(scheduled.chunks(), now)
        if runs := scheduled.num_draft_rows:
            items, ended = accept_runs(scheduled.sampling[:runs], result.sampled[:runs], scheduled.step, now)
            self._send(items, sum(len(item.token_ids) for item in items), ended, now)
        items, ended = accept_rows(
            scheduled.sampling[runs:], result.sampled[runs:], scheduled.step, now, self._memory
        )
        self._send(items, len(items), ended, now)
        for request, place in scheduled.searches.items():
            self._advance_search(request, result.sampled[place.start : place.stop], now)
        for request in scheduled.silent_ends:
            if request.state is not State.FINISHED:
                self._finish(request, "length", 0, now)

    def worker_lost(self, cause: str, *, go_on: bool = True) -> None:
        """Handles the loss of the worker, all KV and the plans in flight. Nothing is planned until `worker_ready`.
        Running requests then continue from their tokens, as after a preemption; with go_on=False they fail."""
        self._blame.lost({request.id: request for request in self._in_flight.owners()}.values())
        self._in_flight.clear()
        self._grammars.worker_lost()
        self._has_worker = False
        self._totals.engine_losses += 1
        running = list(self._batch.running.values())
        self._batch.lose_kv()
        if go_on:
            self._totals.continued += len(running)
            return
        for request in running:
            self._fail(request, 500, f"the engine crashed: {cause}")

    def worker_ready(self, cause: str, *, crashed_by_itself: bool) -> None:
        """Handles a new worker. cause: why the worker before was lost; crashed_by_itself: whether it crashed, and was
        not killed from outside. Fails the request that caused the crash, if one is found."""
        self._has_worker = True
        for request in self._blame.verdict(by_itself=crashed_by_itself):
            self._fail(request, 500, f"the engine crashed {request.crashes} times over this request: {cause}")

    @property
    def in_flight_shape(self) -> str:
        """Returns a description, for a log line, of the plans that the worker has not answered."""
        return self._in_flight.described

    @property
    def step_awaited(self) -> tuple[int, float] | None:
        """Returns the oldest plan in flight and its expected duration in ms (0: unknown); None if there is none."""
        return self._in_flight.awaited

    def close(self, cause: str) -> None:
        """Ends every open request with status 503 and the given cause, and refuses later requests in the same way."""
        if self._closed is not None:
            return
        self._closed = cause
        self._in_flight.clear()
        for request in list(self._open.values()):
            self._fail(request, 503, cause)
        self._out.put(RequestError(id, 503, cause) for id in self._searches.take_gathering())
        self._memory.close()

    # ---------------------------------------------------------------- outputs

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next plan; None if there is nothing to do or enough is in flight. The caller must send it,
        because its rows count as written from here on. now: monotonic seconds."""
        if self._closed is not None or not self._has_worker or not self._in_flight.has_room:
            return None
        if not self._open and not self._memory.has_work:
            return None
        awaited = bool(self._in_flight)
        scheduled = self._planner.plan(self._batch.last_planned + 1, now, results_awaited=awaited)
        if scheduled is None:
            return None
        self._batch.last_planned = scheduled.step
        self._in_flight.append(scheduled)
        return self._grammars.shared(scheduled.as_plan())

    def take_messages(self) -> list[RouterMessage]:
        """Returns the messages to the detokenizer since the last call, in order."""
        return self._out.take()

    def take_kv_events(self) -> list[KvEvent]:
        return self._memory.take_events()

    def take_handles(self) -> list[str]:  # see `RunningBatch`
        return self._batch.take_handles()

    def load_report(self) -> LoadReport:
        return load_report(self._totals, self._batch, self._waiting, self._memory, self._adapters)

    @property
    def last_planned(self) -> int:
        return self._batch.last_planned

    @property
    def num_open(self) -> int:
        """Number of requests that still owe their final message."""
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """True if no request is open and no plan in flight."""
        return not self._open and not self._in_flight

    # ---------------------------------------------------------------- results

    def _send(self, items: list[TokensItem], count: int, ended: Ended, now: float) -> None:
        self._totals.generation_tokens += count
        self._out.emit(items)
        for request, entry in ended:
            self._accept_last(request, entry, now)

    def _accept_last(self, request: Request, entry: Sampled, now: float) -> None:
        if entry.late:
            self._batch.postpone(request)
            return
        if entry.token_id < 0:  # the error comes from the request's own grammar
            status, cause = (500, NOT_FINITE) if entry.error is None else (400, entry.error)
            self._fail(request, status, cause, forget=True)
            return
        is_stop = entry.token_id in request.stop_ids and request.num_output >= request.sampling.min_tokens
        if is_stop and (ending := request.ending_for(entry.token_id)):
            self._continue_behind(request, ending, now)
            return
        self._totals.generation_tokens += 1
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        request.num_output += 1
        request.tokens.append(entry.token_id)
        self._history.add(request.num_output)
        if is_stop:
            self._finish(request, "stop", request.num_output, now, stop_token=entry.token_id)
        else:
            self._finish(request, "length", request.num_output, now, last=entry)

    def _continue_behind(self, request: Request, token_ids: Sequence[int], now: float) -> None:
        """Replaces the end of a turn within the reasoning by the reasoning's end (`EarlyEnd`), and lets the request go
        on. Its tokens are sent as those of a step, with the log-probability of what could not be otherwise."""
        wanted = request.sampling.logprobs is not None
        logprobs = [TokenLogprob(one, 0.0, 1, (), ()) for one in token_ids] if wanted else None
        cached = None if request.num_output else request.cached_tokens
        self._totals.generation_tokens += len(token_ids)
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        request.early_end = None  # a model that never answers would otherwise reason until max_tokens
        self._batch.continue_behind(request, token_ids)
        self._out.emit([TokensItem(request.id, [*token_ids], logprobs, cached_tokens=cached)])

    def _advance_search(self, request: Request, sampled: list[Sampled], now: float) -> None:
        """Takes the results of a search's rows, unless the search ended or was preempted meanwhile."""
        if request.state is not State.DECODE:
            return
        if any(entry.token_id < 0 for entry in sampled):
            self._fail(request, 500, NOT_FINITE, forget=True)
            return
        if not request.num_output:
            self._memory.save(request)
        items = self._searches.advance(request, sampled, now)
        if items:
            self._history.add(request.num_output)
            self._release(request)
            self._out.emit(items)

    # ---------------------------------------------------------------- ending

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        completion_tokens: int,
        now: float,
        *,
        last: Sampled | None = None,
        stop_token: int | None = None,
    ) -> None:
        """Sends the final message, including the token `last` if it is part of the answer."""
        self._release(request)
        item = TokensItem(
            id=request.id,
            token_ids=[] if last is None else [last.token_id],
            logprobs=None if last is None or last.logprob is None else [last.logprob],
            finish_reason=reason,
            stop_token=stop_token,
            usage=request.usage(completion_tokens, now),
        )
        self._out.emit([item])

    def _fail(self, request: Request, status: int, message: str, *, forget: bool = False) -> None:
        ids = request.answer_ids
        self._release(request, forget=forget)
        self._out.put(RequestError(id=id, status=status, message=message) for id in ids)

    def _release(self, request: Request, *, forget: bool = False) -> None:
        """Frees all resources of an open request; the module's docstring says why its rows in flight are harmless."""
        del self._open[request.id]
        if request.adapter:
            self._adapters -= Counter((request.adapter,))  # drops counts of 0
        self._searches.ended(request)
        self._grammars.left(request.sampling.grammar)
        self._shares.left(request.tenant)
        self._planner.background.left(request)
        self._batch.release(request, forget=forget)

    def check(self) -> None:
        """Raises AssertionError if a count is wrong. O(running)."""
        self._batch.check()
        held = len(self._batch.running) + len(self._batch.loading) + len(self._batch.postponed)
        if len(self._open) != len(self._waiting) + held:
            raise AssertionError("an open request is neither waiting nor loading nor postponed nor running")

    def check_slots(self) -> None:
        """Raises AssertionError unless every KV slot is free, owned by one request, or cached. O(num_slots)."""
        self._batch.check_slots()

"""The scheduler: events in, step plans and messages out. It reads no clock and owns no socket.

Every change of a request's state happens in this file. A caller feeds it the events as they come (`add`,
`abort`, `stop_hit`, `step_result`, `close`), asks for the next `plan` until that is None, and sends what
`take_messages` returns to the detokenizer.

Two plans may be in flight: N+1 is built while the worker runs N. It needs no token values, for a decode row
means "the token you sampled last". Whatever ends a request between the two (a stop token, an abort) leaves
at most one row of it in N+1, a wasted one. That row is harmless, although the request's slots are free at
once and may be handed out in N+2: **the worker executes plans strictly in order**, so the stale row writes
before the new owner does, and the new owner reads no position that it has not written itself.
"""

from __future__ import annotations

from collections import Counter, deque

from moeserve.messages.schema import (
    CloseText,
    FinishReason,
    GenerateRequest,
    LoadReport,
    OpenText,
    RequestError,
    Sampled,
    StepPlan,
    StepResult,
    StopHit,
    TokenLogprob,
    TokensItem,
    TokensOut,
)
from moeserve.router.core.admission import Admission, Claim, is_safe, safe_grants
from moeserve.router.core.flight import Flight
from moeserve.router.core.limits import Limits
from moeserve.router.core.request import Request, State
from moeserve.router.core.token_pool import TokenPool
from moeserve.router.core.waiting import WaitingQueue

MAX_PLANS_IN_FLIGHT = 2

Message = OpenText | CloseText | TokensOut | RequestError


class ProtocolError(Exception):
    """The worker answered something other than the oldest plan in flight: its results mean nothing."""


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pool = TokenPool(limits.num_kv_slots)
        self._admission = Admission(limits.num_kv_slots)
        self._closed: str | None = None  # why no request is served any more

        self._open: dict[int, Request] = {}  # every request that still owes its final message, by id
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}  # those bound to a request slot: PREFILL, DECODE or ENDING
        self._prefilling: list[Request] = []  # the PREFILL ones, by key
        self._decoding: dict[int, Request] = {}  # the DECODE ones
        self._free_req_slots = list(range(limits.max_running - 1, -1, -1))
        self._refused: Request | None = None  # a head of the queue that admission refused; see _may_run

        self._step = 0  # number of the last plan
        self._in_flight: deque[Flight] = deque()
        self._out: list[Message] = []

        self._total_steps = 0
        self._total_prompt_tokens = 0
        self._total_generation_tokens = 0
        self._total_aborts = 0

    # ---------------------------------------------------------------- events

    def add(self, message: GenerateRequest) -> None:
        """Queues a request, or answers it with a RequestError: 400 when it can never fit, 503 when too many
        wait or the worker is gone. Raises ValueError for an id that is open."""
        if message.id in self._open:
            raise ValueError(f"request id {message.id} is in use")
        refusal = self.limits.refusal(message, len(self._waiting))
        if self._closed is not None:
            refusal = RequestError(id=message.id, status=503, message=self._closed)
        if refusal is not None:
            self._out.append(refusal)
            return
        request = Request(message)
        self._open[request.id] = request
        self._waiting.add(request)
        self._out.append(OpenText(id=request.id, text=message.text))

    def abort(self, request_id: int) -> None:
        """Frees everything at once. An id that is not open (finished, aborted, unknown) is no error: the
        client's going and the request's end cross each other on the way."""
        request = self._open.get(request_id)
        if request is None:
            return
        self._release(request)
        self._total_aborts += 1
        self._out.append(CloseText(id=request_id))

    def stop_hit(self, hit: StopHit) -> None:
        """Ends a request at a stop string. Tokens sampled after it do not count as the client's. As with
        `abort`, the request may have ended meanwhile; its final message is out then."""
        request = self._open.get(hit.id)
        if request is not None:
            completion_tokens = min(hit.num_tokens, request.num_output)
            self._finish(request, "stop", completion_tokens, now=request.last_token_at)

    def step_result(self, result: StepResult, now: float) -> None:
        """Takes the result of the oldest plan in flight. Raises ProtocolError when it is another's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise ProtocolError(f"the worker answered step {result.step}, which is not the oldest in flight")
        flight = self._in_flight.popleft()
        if len(result.sampled) != len(flight.sampling):
            raise ProtocolError(f"{len(result.sampled)} tokens for {len(flight.sampling)} rows that sample")
        self._total_steps += 1
        self._total_prompt_tokens += flight.prompt_tokens
        for index, logprobs in result.prompt_logprobs.items():
            self._accept_prompt_logprobs(flight.owners[index], logprobs)
        self._accept_tokens(flight.sampling, result.sampled, now)
        for request in flight.silent_ends:
            if request.state is not State.FINISHED:
                self._finish(request, "length", 0, now)

    def close(self, cause: str) -> None:
        """No step will run any more (the worker died, or the server stops): every open request ends with a
        503, and later ones are refused with it. The first cause stays."""
        if self._closed is not None:
            return
        self._closed = cause
        self._in_flight.clear()
        for request in list(self._open.values()):
            self._fail(request, 503, cause)

    # ---------------------------------------------------------------- outputs

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do or two plans are in flight. The caller sends
        it: from here on its rows count as written."""
        if self._closed is not None or len(self._in_flight) == MAX_PLANS_IN_FLIGHT:
            return None
        budget = self.limits.max_num_batched_tokens - len(self._decoding)
        self._admit(budget)
        grants = None if self._admission.everything_fits else self._grants(budget)
        flight = Flight(self._step + 1)
        self._plan_decode_rows(flight, grants)
        self._plan_prefill_rows(flight, grants, budget, now)
        if not flight.rows:
            return None
        self._step = flight.step
        self._in_flight.append(flight)
        return flight.as_plan()

    def take_messages(self) -> list[Message]:
        """What the events since the last call have for the detokenizer, in order."""
        out, self._out = self._out, []
        return out

    def load_report(self) -> LoadReport:
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_slots_used=self._pool.num_used,
            kv_slots_total=self._pool.num_slots,
            prompt_tokens=self._total_prompt_tokens,
            generation_tokens=self._total_generation_tokens,
            cached_tokens=0,
            preemptions=0,
            aborts=self._total_aborts,
            steps=self._total_steps,
        )

    @property
    def is_idle(self) -> bool:
        """No request is open and no plan in flight."""
        return not self._open and not self._in_flight

    # ---------------------------------------------------------------- starting

    def _admit(self, budget: int) -> None:
        """Binds waiting requests to request slots while this step has prompt tokens left for them.

        Prompts get the budget in order of key, whether they are under way or waiting, so an urgent request
        does not wait for a long prompt of a less urgent one. Within the queue nobody passes its head: were
        small requests let by while a large one does not fit, a stream of them would starve it.
        """
        at = 0
        while budget > 0:
            under_way = self._prefilling[at] if at < len(self._prefilling) else None
            head = self._waiting.head
            if head is not None and (under_way is None or head.key < under_way.key) and self._may_run(head):
                self._bind(head, at)
                under_way = head
            if under_way is None:
                return
            budget -= under_way.prompt_left
            at += 1

    def _may_run(self, head: Request) -> bool:
        # The estimate changes for the better only when somebody leaves: a refusal holds until then.
        if not self._free_req_slots or head is self._refused:
            return False
        if not self._admission.admits(self._running.values(), head):
            self._refused = head
            return False
        return True

    def _bind(self, head: Request, at: int) -> None:
        self._waiting.remove(head)
        self._admission.joined(head)
        self._running[head.id] = head
        self._prefilling.insert(at, head)
        head.req_slot = self._free_req_slots.pop()
        head.state = State.PREFILL

    # ---------------------------------------------------------------- planning

    def _grants(self, budget: int) -> dict[int, int]:
        """KV slots that each running request, by id, may take in this step. A prompt asks for all the budget
        it could use: only some prompts then get tokens, but never none while one is granted slots."""
        wants = {request.id: min(request.prompt_left, budget) for request in self._prefilling}
        wants.update(dict.fromkeys(self._decoding, 1))
        return safe_grants(self._pool.num_free, self._claims(), wants)

    def _claims(self) -> list[Claim]:
        claims: list[Claim] = []
        for request in self._running.values():
            held = len(request.slots)
            claims.append((request.max_kv - held, held, request.id))
        return claims

    def _plan_decode_rows(self, flight: Flight, grants: dict[int, int] | None) -> None:
        batch = list(self._decoding.values())
        if grants is not None:
            batch = [request for request in batch if grants[request.id] > 0]
        flight.add_decode_rows(batch, self._pool)
        for request in batch:
            if len(request.slots) == request.max_kv:
                del self._decoding[request.id]
                request.state = State.ENDING

    def _plan_prefill_rows(
        self, flight: Flight, grants: dict[int, int] | None, budget: int, now: float
    ) -> None:
        """Chunks of prompts in order of key, as far as `budget` tokens go."""
        for request in self._prefilling:
            count = min(request.prompt_left, budget)
            if grants is not None:
                count = min(count, grants[request.id])
            if count == 0:
                continue
            flight.add_chunk(request, count, self._pool, now)
            budget -= count
            if request.prompt_left > 0:
                continue
            if request.need > 0:
                request.state = State.DECODE
                self._decoding[request.id] = request
            else:
                request.state = State.ENDING
        if flight.prompt_tokens:
            self._prefilling = [r for r in self._prefilling if r.state is State.PREFILL]

    # ---------------------------------------------------------------- results

    def _accept_prompt_logprobs(self, owner: Request, logprobs: list[TokenLogprob]) -> None:
        if owner.state is not State.FINISHED and logprobs:
            self._emit([TokensItem(owner.id, [], prompt_logprobs=logprobs)])

    def _accept_tokens(self, owners: list[Request], sampled: list[Sampled], now: float) -> None:
        items: list[TokensItem] = []
        ended: list[tuple[Request, Sampled]] = []
        for request, entry in zip(owners, sampled, strict=True):
            if request.state is State.FINISHED:
                continue  # the wasted row of one that ended while this plan was in flight
            token_id = entry.token_id
            count = request.num_output
            if (
                token_id < 0
                or count + 1 == request.sampling.max_tokens
                or (token_id in request.stop_ids and count >= request.sampling.min_tokens)
            ):
                ended.append((request, entry))
                continue
            if count == 0:
                request.first_token_at = now
            request.last_token_at = now
            request.num_output = count + 1
            items.append(
                TokensItem(request.id, [token_id], None if entry.logprob is None else [entry.logprob])
            )
        self._total_generation_tokens += len(items)
        self._emit(items)
        for request, entry in ended:
            self._accept_last(request, entry, now)

    def _accept_last(self, request: Request, entry: Sampled, now: float) -> None:
        if entry.token_id < 0:
            if entry.error is not None:
                self._fail(request, 400, entry.error)  # its own grammar was too much
            else:
                self._fail(request, 500, "the model produced non-finite logits for this request")
            return
        is_stop = entry.token_id in request.stop_ids and request.num_output >= request.sampling.min_tokens
        self._total_generation_tokens += 1
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        request.num_output += 1
        if is_stop:
            self._finish(request, "stop", request.num_output, now, stop_token=entry.token_id)
        else:
            self._finish(request, "length", request.num_output, now, last=entry)

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
        """The final message, with the `last` token where it is part of the answer."""
        self._release(request)
        item = TokensItem(
            id=request.id,
            token_ids=[] if last is None else [last.token_id],
            logprobs=None if last is None or last.logprob is None else [last.logprob],
            finish_reason=reason,
            stop_token=stop_token,
            usage=request.usage(completion_tokens, now),
        )
        self._emit([item])

    def _fail(self, request: Request, status: int, message: str) -> None:
        self._release(request)
        self._out.append(RequestError(id=request.id, status=status, message=message))

    def _release(self, request: Request) -> None:
        """Takes back all that an open request holds (see the module's text on rows in flight)."""
        del self._open[request.id]
        if request.state is State.WAITING:
            self._waiting.remove(request)
        else:
            if request.state is State.PREFILL:
                self._prefilling.remove(request)
            self._decoding.pop(request.id, None)
            del self._running[request.id]
            self._pool.free(request.slots)
            self._free_req_slots.append(request.req_slot)
            self._admission.left(request)
        request.state = State.FINISHED
        self._refused = None

    def _emit(self, items: list[TokensItem]) -> None:
        """Adds to the last TokensOut if nothing came after it, so that a step makes one message."""
        if not items:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, TokensOut):
            last.items.extend(items)
        else:
            self._out.append(TokensOut(items=items))

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """Raises AssertionError when a count is off or the running could not all finish. O(running)."""
        running = list(self._running.values())
        held = sum(len(request.slots) for request in running)
        req_slots = self._free_req_slots + [request.req_slot for request in running]
        states = Counter(request.state for request in running)
        facts = {
            "KV slots are free or held": self._pool.num_used == held,
            "request slots are free or bound": sorted(req_slots) == list(range(self.limits.max_running)),
            "what is promised is the running's most": self._admission.promised
            == sum(request.max_kv for request in running),
            "all running can finish": is_safe(self._pool.num_free, self._claims()),
            "open is waiting or running": len(self._open) == len(self._waiting) + len(running),
            "PREFILL matches its list": states[State.PREFILL] == len(self._prefilling),
            "DECODE matches its dict": states[State.DECODE] == len(self._decoding),
        }
        broken = [name for name, holds in facts.items() if not holds]
        if broken:
            raise AssertionError(f"broken invariants: {broken}")

    def check_slots(self) -> None:
        """Raises AssertionError unless every KV slot is free or held by one request, once. O(num_slots)."""
        self._pool.check(request.slots for request in self._running.values())

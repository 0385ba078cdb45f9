"""The running batch: requests that are bound to request slots. Binds, preempts and releases requests;
`preemption.py` chooses the request to preempt.

**Beam searches.** A search is one request with a request slot per beam, and is bound, preempted and released as a
whole. After a preemption or a lost worker it starts again after its prompt: its client has received no tokens yet,
and the search finds the same beams.

**Postponement.** Compiling a grammar may take a second, and steps do not wait for it. The request leaves the batch,
its prompt's KV stays cached, and it is retried after 2 steps, then 4, 8, ... at most MOST_STEPS_POSTPONED; for the mask
of a later token, after 2 again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.router_metrics import LoadReport
from moeserve.router.core.batch.admission import AdmissionPolicy
from moeserve.router.core.batch.waiting_queue import WaitingQueue
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.request import Request, State

MOST_STEPS_POSTPONED = 32


class RunningBatch:
    """Binds, preempts and releases requests. The only writer of a request's `state`, `req_slot`, `target` and
    the fields that `Request` lists with them."""

    def __init__(
        self, limits: Limits, memory: SequenceMemory, waiting: WaitingQueue, totals: LoadReport
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._waiting = waiting
        self.admission = AdmissionPolicy(memory)
        self.running: dict[int, Request] = {}  # id → request in PREFILL, DECODE or ENDING
        self.prefilling: list[Request] = []  # requests in PREFILL
        self.decoding: dict[int, Request] = {}  # requests in DECODE, except beam searches
        self.searching: dict[int, Request] = {}  # beam searches in DECODE
        self.postponed: list[Request] = []  # requests in POSTPONED
        self.loading: dict[int, Request] = {}  # id → request in LOADING
        self.last_planned = self.last_finished = 0  # numbers of steps; written by Scheduler
        self._totals = totals
        self._free_req_slots = list(range(limits.max_running - 1, -1, -1))
        # The request that `may_bind` last refused for lack of memory; None after any release.
        self._refused: Request | None = None
        # (last plan that may use the handle, handle of a released request's embeddings)
        self._left_spans: deque[tuple[int, str]] = deque()

    # ---------------------------------------------------------------- joining

    def join(self, request: Request) -> None:
        """Queues a new request."""
        self._memory.opened(request)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Adds a request to the queue, which is ordered by the tokens left to compute after the prefix cache's."""
        matched, _ = self._memory.lookup(request)
        self._waiting.add(request, len(request.tokens) - matched)

    def begin_load(self, request: Request, now: float) -> bool:
        """Takes a request from the queue if more of its prefix is to be loaded from a tier. Returns False, and leaves
        it in the queue, if nothing is to be loaded. now: monotonic seconds."""
        if not self._memory.begin_load(request, now):
            return False
        self._waiting.remove(request)
        self.admission.joined(request)
        request.target = len(request.tokens)
        request.state = State.LOADING
        self.loading[request.id] = request
        return True

    def end_loads(self, sequences: Iterable[HeldSequence]) -> None:
        """Returns requests to the queue after their loads have ended."""
        for sequence in sequences:
            request = self.loading.pop(sequence.id)
            self.admission.left(request)
            request.state = State.WAITING
            self.enqueue(request)
            self._refused = None

    @property
    def num_free_req_slots(self) -> int:
        """Number of free request slots that no loading request will need."""
        return len(self._free_req_slots) - sum(request.width for request in self.loading.values())

    def may_bind(self, request: Request) -> bool:
        """Returns whether request slots are free and the KV pool is predicted to suffice for the batch with
        `request`."""
        # The prediction improves only when a request leaves, so a refusal stays valid until then.
        has_slots = self.num_free_req_slots >= request.width
        if not has_slots or request is self._refused or self.must_wait(request):
            return False
        if not self.admission.admits([*self.running.values(), *self.loading.values()], request):
            self._refused = request
            return False
        return True

    def must_wait(self, request: Request) -> bool:
        """Returns whether the request cannot be bound yet, even if others are preempted: a row of it may still be in
        flight after a preemption, and the NewSeq that binds it again must contain that row's token; or it is a suspect
        of a worker crash (`crash_blame.py`), and another suspect is being tried."""
        if request.resume_after > self.last_finished:
            return True
        return request.is_on_trial and any(other.is_on_trial for other in self.running.values())

    def bind(self, request: Request) -> None:
        """Moves a waiting request into the batch: assigns a request slot and the cached prefix of its tokens."""
        self._waiting.remove(request)
        self.admission.joined(request)
        self._memory.attach(request)
        req_slots = [self._free_req_slots.pop() for _ in range(request.width)]
        request.req_slot = req_slots[0]
        if request.beams is not None:
            request.beams.bound(req_slots)
        request.state = State.PREFILL
        request.target = len(request.tokens)
        request.announced = False
        if request.cached_tokens is None:
            request.cached_tokens = len(request.slots)
            self._totals.cached_tokens += len(request.slots)
            self._totals.prompt_tokens += len(request.slots)
        self.running[request.id] = request
        self.prefilling.append(request)

    def planned(self, request: Request) -> None:
        """Updates the state of a request for which rows were planned."""
        if request.prompt_left > 0:
            return
        if request.state is State.PREFILL:
            self.prefilling.remove(request)
            request.state = State.DECODE
            if request.beams is not None:
                self.searching[request.id] = request
                return
            self.decoding[request.id] = request
        if request.need == 0:
            del self.decoding[request.id]
            request.state = State.ENDING

    @property
    def num_rows(self) -> int:
        """Upper limit of the decode rows in the next step, beams included."""
        return len(self.decoding) + sum(request.width for request in self.searching.values())

    @property
    def num_slots_due(self) -> int:
        """Number of KV slots that the decode rows of the next step need, beams included."""
        rows = len(self.decoding)
        if self._limits.max_drafts:
            rows = sum(request.lacks_slot for request in self.decoding.values())
        return rows + sum(request.num_beams_due for request in self.searching.values())

    # ---------------------------------------------------------------- leaving

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Ends a waiting or running request and frees its resources. forget: do not cache its KV."""
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request.state is State.POSTPONED:
            self.postponed.remove(request)
        elif request.state is State.LOADING:
            del self.loading[request.id]
            self.admission.left(request)
            self._memory.leave_load(request)
        else:
            self._unbind(request, forget=forget)
        request.state = State.FINISHED
        self._refused = None
        self._memory.closed(request)
        self.leave_spans(request.spans)

    def leave_spans(self, spans: Iterable[EmbeddingSpan]) -> None:
        """Notes that a request has ended whose embedding spans only plans in flight still use."""
        self._left_spans += [(self.last_planned, span.handle) for span in spans]

    def take_handles(self) -> list[str]:
        """Returns, once, the handles of embeddings that no plan will use any more."""
        handles = []
        while self._left_spans and self._left_spans[0][0] <= self.last_finished:
            handles.append(self._left_spans.popleft()[1])
        return handles

    def preempt(self, request: Request) -> None:
        """Returns a running request to the queue; its KV stays cached until it is evicted."""
        self._leave(request)
        request.state = State.WAITING
        self.enqueue(request)
        self._totals.preemptions += 1

    def _leave(self, request: Request) -> None:
        request.num_lost = request.num_planned
        request.resume_after = self.last_planned
        request.tiers_were_asked = False
        self._unbind(request, preempted=True)
        self._begin_again(request)
        self._refused = None

    def continue_behind(self, request: Request, token_ids: Sequence[int]) -> None:
        """Returns a request to the queue, to continue behind these tokens. They take the place of the token that its
        last row returned, so that the rows in flight, which continue that token, are stale."""
        is_running = request.id in self.running
        if is_running:
            self._leave(request)
        request.stale_through = self.last_planned
        request.tokens.extend(token_ids)
        request.num_output += len(token_ids)
        if is_running:
            request.state = State.WAITING
            self.enqueue(request)

    def postpone(self, request: Request) -> None:
        """Takes a request whose grammar mask is late out of the batch. Ignores a request that has left the batch
        already."""
        if request.id not in self.running:
            return
        self._leave(request)
        request.state = State.POSTPONED
        # it waits for the mask of another token than last time
        if request.num_output > request.output_postponed:
            request.output_postponed, request.num_postponed = request.num_output, 0
        request.num_postponed += 1
        request.retry_at = self.last_planned + min(2**request.num_postponed, MOST_STEPS_POSTPONED)
        self.postponed.append(request)

    def retry_postponed(self) -> None:
        """Queues the postponed requests whose retry is due; all of them if nothing else runs."""
        for request in list(self.postponed):
            if request.retry_at <= self.last_planned or not self.running:
                self.postponed.remove(request)
                request.state = State.WAITING
                self.enqueue(request)

    def lose_kv(self) -> None:
        """Returns all running requests to the queue with nothing cached, after the worker was lost with its KV."""
        self.last_finished = self.last_planned
        lost = list(self.running.values())
        for request in lost:
            request.num_lost = request.num_planned
            self._unbind(request, forget=True)
            self._begin_again(request)
        self._memory.clear()
        for request in self.loading.values():
            self.admission.left(request)
        lost += self.loading.values()
        self.loading.clear()
        for request in lost:
            request.state = State.WAITING
            request.tiers_were_asked = False
            self.enqueue(request)
        self._refused = None

    def _begin_again(self, request: Request) -> None:
        """Resets a beam search that leaves the batch before its end."""
        if request.beams is not None:
            self._totals.beam_restarts += request.num_output > 0
            request.num_output = 0

    def _unbind(self, request: Request, *, forget: bool = False, preempted: bool = False) -> None:
        if request.state is State.PREFILL:
            self.prefilling.remove(request)
        self.decoding.pop(request.id, None)
        self.searching.pop(request.id, None)
        del self.running[request.id]
        self._memory.detach(request, forget=forget, preempted=preempted)
        self._free_req_slots += request.req_slots
        self.admission.left(request)

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """Raises AssertionError if a count is wrong. O(running)."""
        running = list(self.running.values())
        self._memory.check_counts(running)
        states = Counter(request.state for request in running)
        req_slots = self._free_req_slots + [slot for request in running for slot in request.req_slots]
        invariants = {
            "each request slot is free or bound": sorted(req_slots) == list(range(self._limits.max_running)),
            "max_kv_total is the sum over the batch": self.admission.max_kv_total
            == sum(r.max_kv for r in [*running, *self.loading.values()]),
            "PREFILL matches its list": states[State.PREFILL] == len(self.prefilling),
            "DECODE matches its dicts": states[State.DECODE] == len(self.decoding) + len(self.searching),
            "no request holds more than max_kv": all(r.num_slots <= r.max_kv for r in running),
            "drafts have slots": all(0 <= r.pending_drafts <= r.spare for r in running),
        }
        broken = [name for name, holds in invariants.items() if not holds]
        if broken:
            raise AssertionError(f"broken invariants: {broken}")

    def check_slots(self) -> None:
        """Raises AssertionError unless every KV slot is free, owned by one request, or cached. O(num_slots)."""
        self._memory.check_slots(self.running.values())

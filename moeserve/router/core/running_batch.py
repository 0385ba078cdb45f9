"""The running requests: those bound to a request slot, and how one is bound, paused and released.

**Pausing.** The pool runs dry when answers get longer than predicted. Then somebody gives its slots up and
goes back to the queue; what it computed stays in the prefix cache while there is room, and when it is bound
again only the rest is computed anew. Who: of the key that holds most, the youngest request. The youngest has
waited least and lost least; and the oldest of all is never paused, so it always reaches its end, then the next
oldest is the oldest: nothing waits for ever, and no two requests can pause each other in turn.

**Making way.** With API keys, a request of a key that runs little may find all places taken by a key that runs
much. Then the youngest of that key is paused for it, as long as that leaves it the larger part. A request that was
paused so is not again before it has got a token: two keys whose prompts do not fit beside one another would else
pause each other in turn for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moeserve.router.core.admission import AdmissionPolicy
from moeserve.router.core.kv_memory import KvMemory
from moeserve.router.core.limits import Limits
from moeserve.router.core.request import Request, State
from moeserve.router.core.waiting_queue import WaitingQueue, by_age

PREEMPTIBLE = (State.PREFILL, State.DECODE)  # in ENDING a request gives all back in a moment anyway


class RunningBatch:
    """The one writer of a request's `state`, `req_slot`, `target` and what else its text says."""

    def __init__(self, limits: Limits, memory: KvMemory, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._memory = memory
        self._waiting = waiting
        self.admission = AdmissionPolicy(memory)
        self.running: dict[int, Request] = {}  # PREFILL, DECODE or ENDING, by id
        self.prefilling: list[Request] = []  # the PREFILL ones
        self.decoding: dict[int, Request] = {}  # the DECODE ones
        self.last_planned = self.last_finished = 0  # steps; written by Scheduler
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of prompts, found in the cache
        self._free_req_slots = list(range(limits.max_running - 1, -1, -1))
        self._refused: Request | None = None  # see may_bind

    # ---------------------------------------------------------------- into the batch

    def enqueue(self, request: Request) -> None:
        """To the queue, ordered by what the cache leaves to compute of it."""
        matched, _ = self._memory.lookup(request)
        self._waiting.add(request, len(request.tokens) - matched)

    @property
    def num_free_places(self) -> int:
        return len(self._free_req_slots)

    def may_bind(self, request: Request) -> bool:
        # The estimate changes for the better only when somebody leaves: a refusal holds until then.
        if not self._free_req_slots or request is self._refused or self._is_in_flight(request):
            return False
        if not self.admission.admits(self.running.values(), request):
            self._refused = request
            return False
        return True

    def _is_in_flight(self, request: Request) -> bool:
        """Paused so lately that a row of it may not be done: the token that it brings belongs to what the worker
        is told when the request is bound again."""
        return request.resume_after > self.last_finished

    def bind(self, request: Request) -> None:
        """A waiting request gets a place, and what the cache has of its tokens."""
        self._waiting.remove(request)
        self.admission.joined(request)
        self._memory.attach(request)
        request.req_slot = self._free_req_slots.pop()
        request.state = State.PREFILL
        request.target = len(request.tokens)
        request.announced = False
        if request.cached_tokens is None:
            request.cached_tokens = len(request.slots)
            self.num_cached_tokens += len(request.slots)
        self.running[request.id] = request
        self.prefilling.append(request)

    def planned(self, request: Request) -> None:
        """Rows of it were planned: it may have reached its next state."""
        if request.prompt_left > 0:
            return
        if request.state is State.PREFILL:
            self.prefilling.remove(request)
            request.state = State.DECODE
            self.decoding[request.id] = request
        if request.need == 0:
            del self.decoding[request.id]
            request.state = State.ENDING

    # ---------------------------------------------------------------- out of the batch

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Takes back all that a request holds, waiting or running. `forget`: nothing of it is to be reused."""
        if request.state is State.WAITING:
            self._waiting.remove(request)
        else:
            self._unbind(request, forget=forget)
        request.state = State.FINISHED
        self._refused = None

    def preempt(self, request: Request) -> None:
        """Back to the queue, with its slots up for eviction."""
        request.num_lost = len(request.slots)
        request.resume_after = self.last_planned
        self._unbind(request, forget=False)
        request.state = State.WAITING
        self.enqueue(request)
        self.num_preemptions += 1
        self._refused = None

    def _unbind(self, request: Request, *, forget: bool) -> None:
        if request.state is State.PREFILL:
            self.prefilling.remove(request)
        self.decoding.pop(request.id, None)
        del self.running[request.id]
        self._memory.detach(request, forget=forget)
        self._free_req_slots.append(request.req_slot)
        self.admission.left(request)

    # ---------------------------------------------------------------- room

    def preempt_for_decode_slots(self) -> None:
        """Pauses until there is a slot for each decode row, or nobody is left to pause: then the oldest waits
        for those at their end. Before any row of the plan, for what is paused may be overwritten in it."""
        while len(self.decoding) > self._memory.available:
            victim = self._victim()
            if victim is None:
                return
            self.preempt(victim)

    def break_deadlock(self) -> bool:
        """Pauses somebody when none can be given a slot and no result is awaited. False: nobody is left."""
        victim = self._victim()
        if victim is not None:
            self.preempt(victim)
        return victim is not None

    def _victim(self) -> Request | None:
        """The youngest of the tenant that holds most, unless it is the oldest of all."""
        oldest = min(self.running.values(), key=by_age, default=None)
        candidates = [r for r in self.running.values() if r.state in PREEMPTIBLE and r is not oldest]
        if not candidates:
            return None
        held = Counter[str]()
        for request in candidates:
            held[request.tenant] += len(request.slots)
        most = max(held, key=lambda tenant: (held[tenant], tenant))
        return max((r for r in candidates if r.tenant == most), key=by_age)

    def preempt_for_fairness(self, request: Request) -> None:
        """Lets a waiting request in at the cost of tenants that run more than its own would then. Before any
        row of the plan."""
        while not self.may_bind(request):
            victim = None if self._is_in_flight(request) else self._victim_for(request)
            if victim is None:
                return
            victim.fairness_preempted_at = victim.num_output
            self.preempt(victim)

    def _victim_for(self, request: Request) -> Request | None:
        """The youngest of the tenant that has most of what is short, if it has more than it would take."""
        tenants = {r.tenant for r in self.running.values() if _may_be_preempted(r)} - {request.tenant}
        if not tenants:
            return None
        if self._free_req_slots:
            mine = self._holding(request.tenant) + len(request.tokens)
            most = max(tenants, key=lambda tenant: (self._holding(tenant), tenant))
            fair = self._holding(most) > mine
        else:
            counts = Counter(r.tenant for r in self.running.values())
            most = max(tenants, key=lambda tenant: (counts[tenant], tenant))
            fair = counts[most] > counts[request.tenant] + 1
        if not fair:
            return None
        return max(filter(_may_be_preempted, self._of(most)), key=by_age)

    def _of(self, tenant: str) -> Iterator[Request]:
        return (r for r in self.running.values() if r.tenant == tenant and r.state in PREEMPTIBLE)

    def _holding(self, tenant: str) -> int:
        return sum(len(r.slots) for r in self._of(tenant))

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """Raises AssertionError when a count is off. O(running)."""
        running = list(self.running.values())
        self._memory.check_counts(running)
        states = Counter(request.state for request in running)
        req_slots = self._free_req_slots + [request.req_slot for request in running]
        facts = {
            "request slots are free or bound": sorted(req_slots) == list(range(self._limits.max_running)),
            "what is promised is the running's most": self.admission.promised
            == sum(r.max_kv for r in running),
            "PREFILL matches its list": states[State.PREFILL] == len(self.prefilling),
            "DECODE matches its dict": states[State.DECODE] == len(self.decoding),
            "nobody holds more than it ever needs": all(r.need >= 0 for r in running),
        }
        broken = [name for name, holds in facts.items() if not holds]
        if broken:
            raise AssertionError(f"broken invariants: {broken}")

    def check_slots(self) -> None:
        """Raises AssertionError unless every KV slot is free, held by one, or cached, once. O(num_slots)."""
        self._memory.check_slots(self.running.values())


def _may_be_preempted(request: Request) -> bool:
    return request.state in PREEMPTIBLE and request.fairness_preempted_at != request.num_output

"""Preemption: chooses the running request that gives up its KV slots when there are too few.

**For memory.** The KV pool is exhausted when answers become longer than predicted. Then one request gives up its KV
slots and returns to the queue. Its computed KV stays in the prefix cache while there is room, so that only the rest
is recomputed later. The victim is the youngest request of the tenant with the most slots: it has waited least and
loses least. The oldest request of all is never preempted for memory; so it always finishes, and then the next oldest
is protected: no request starves, and no two requests preempt each other in turn.

**For fairness.** With API keys, a request of a tenant with little running may find all request slots or KV slots taken
by a busy tenant. Then the busy tenant's youngest request is preempted, as long as the busy tenant still keeps more than
the other one. A request preempted for fairness is not preempted again for fairness before it has received a token;
otherwise two tenants whose prompts do not fit together would preempt each other forever.

**Background requests** give up their slots before all others, and to any other request that waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moeserve.router.core.batch.running_batch import RunningBatch
from moeserve.router.core.batch.waiting_queue import by_age
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.request import Request, State

PREEMPTIBLE = (State.PREFILL, State.DECODE)  # an ENDING request releases its slots within two steps anyway


class Preemption:
    """Chooses victims; the batch preempts them. Runs before the rows of a step are planned, because a victim's slots
    may be written in that step."""

    def __init__(self, batch: RunningBatch, memory: SequenceMemory) -> None:
        self._batch = batch
        self._memory = memory

    def for_decode_slots(self) -> None:
        """Preempts requests until there is a KV slot for each decode row or no victim is left; if none is left, the
        oldest request waits for slots of requests that are ENDING."""
        while self._batch.num_slots_due > self._memory.available:
            victim = self._for_memory()
            if victim is None:
                return
            self._batch.preempt(victim)

    def for_fairness(self, request: Request) -> None:
        """Preempts requests of tenants that run more than `request`'s tenant, until `request` may be bound or no
        victim is left."""
        while not self._batch.may_bind(request):
            victim = None if self._batch.must_wait(request) else self._for_tenant_of(request)
            if victim is None:
                return
            victim.fairness_preempted_at = victim.num_output
            self._batch.preempt(victim)

    def for_others(self, request: Request) -> None:
        """Preempts background requests, the youngest first, for a `request` that is no background request. Stops when
        it may be bound, must wait for another reason, or no victim is left."""
        while not self._batch.may_bind(request) and not self._batch.must_wait(request):
            running = self._batch.running.values()
            victims = [one for one in running if one.is_background and one.state in PREEMPTIBLE]
            if not victims:
                return
            self._batch.preempt(max(victims, key=by_age))

    def break_deadlock(self) -> bool:
        """Preempts one request when none can get a KV slot and no result is awaited. Returns False if there is no
        victim."""
        victim = self._for_memory()
        if victim is not None:
            self._batch.preempt(victim)
        return victim is not None

    def _for_memory(self) -> Request | None:
        """Returns the youngest request of the tenant with the most KV slots, a background request if there is one, but
        never the oldest request of all."""
        running = self._batch.running.values()
        oldest = min(running, key=by_age, default=None)
        candidates = [r for r in running if r.state in PREEMPTIBLE and r is not oldest]
        if not candidates:
            return None
        candidates = [one for one in candidates if one.is_background] or candidates
        held = Counter[str]()
        for request in candidates:
            held[request.tenant] += request.num_slots
        most = max(held, key=lambda tenant: (held[tenant], tenant))
        return max((r for r in candidates if r.tenant == most), key=by_age)

    def _for_tenant_of(self, request: Request) -> Request | None:
        """Returns the youngest request of the tenant that holds most of the scarce resource (request slots, or else
        KV slots), if that tenant would still hold more than `request`'s tenant afterwards."""
        running = self._batch.running.values()
        tenants = {r.tenant for r in running if _may_be_preempted_for_fairness(r)} - {request.tenant}
        if not tenants:
            return None
        if self._batch.num_free_req_slots >= request.width:
            mine = self._holding(request.tenant) + len(request.tokens)
            most = max(tenants, key=lambda tenant: (self._holding(tenant), tenant))
            fair = self._holding(most) > mine
        else:
            counts = Counter[str]()
            for one in running:
                counts[one.tenant] += one.width
            most = max(tenants, key=lambda tenant: (counts[tenant], tenant))
            fair = counts[most] > counts[request.tenant] + request.width
        if not fair:
            return None
        return max(filter(_may_be_preempted_for_fairness, self._of(most)), key=by_age)

    def _of(self, tenant: str) -> Iterator[Request]:
        running = self._batch.running.values()
        return (r for r in running if r.tenant == tenant and r.state in PREEMPTIBLE)

    def _holding(self, tenant: str) -> int:
        return sum(r.num_slots for r in self._of(tenant))


def _may_be_preempted_for_fairness(request: Request) -> bool:
    return request.state in PREEMPTIBLE and request.fairness_preempted_at < request.num_output

"""The order in which prompts are served, whether waiting or partly computed.

Between API keys, the least served key is next (`fair_share.py`). The prompts of one key are sorted in two ways:

- By size: most urgent priority first, then fewest tokens left. A short prompt does not wait for a long one that arrived
  earlier, which minimises the mean waiting time.
- By age: arrival time, shifted by priority. While others overtake the oldest prompt, it gets a quarter of the prompt
  tokens, so no prompt starves, however many shorter or more urgent ones arrive.

A background request (`background_share.py`) is next only if no other prompt waits.

Between two chunks the server may switch to another prompt; the computed part is kept.
"""

from __future__ import annotations

from collections.abc import Collection

from moeserve.router.core.batch.waiting_queue import WaitingQueue
from moeserve.router.core.policy.fair_share import FairShare
from moeserve.router.core.request import Request

AGED_SHARE = 0.25  # share of a tenant's prompt tokens for its oldest prompt while others overtake it


class PromptOrder:
    def __init__(self, waiting: WaitingQueue, shares: FairShare) -> None:
        self._waiting = waiting
        self._shares = shares
        self._owed: dict[str, float] = {}  # tenant → tokens owed to its oldest prompt

    def next(
        self, under_way: Collection[Request], *, with_waiting: bool, with_background: bool = True
    ) -> Request | None:
        """Returns the prompt to serve now, from `under_way` or, if with_waiting, also from the queue; None if there is
        none. with_background: whether a background request may be returned. The caller tells `served` how many tokens
        the prompt got."""
        queues = self._waiting.tenants.items() if with_waiting else ()
        tenants = {request.tenant for request in under_way if not request.is_background}
        tenants.update(name for name, queue in queues if not queue.is_background)
        if not tenants and with_background:
            tenants = {request.tenant for request in under_way}
            tenants.update(name for name, _ in queues)
        if not tenants:
            return None
        tenant = self._shares.least_served(tenants)
        shortest, oldest = self._heads(tenant, under_way, with_waiting)
        return oldest if self._owed.get(tenant, 0.0) > 0.0 else shortest

    def served(self, request: Request, tokens: int, under_way: Collection[Request]) -> None:
        """Accounts for `tokens` given to `request`, which `next` returned."""
        self._shares.charge(request.tenant, tokens)
        _, oldest = self._heads(request.tenant, under_way, with_waiting=True)
        owed = self._owed.get(request.tenant, 0.0)
        if request is oldest:
            self._owed[request.tenant] = max(owed - tokens, 0.0)
        else:
            self._owed[request.tenant] = owed + tokens * AGED_SHARE / (1.0 - AGED_SHARE)

    def _heads(
        self, tenant: str, under_way: Collection[Request], with_waiting: bool
    ) -> tuple[Request, Request]:
        """Returns the tenant's first prompt by size and its first by age."""
        mine = [request for request in under_way if request.tenant == tenant]
        sizes = [(request.priority, request.prompt_left, request.age, request) for request in mine]
        ages = [(request.age, request) for request in mine]
        queue = self._waiting.tenants.get(tenant) if with_waiting else None
        if queue is not None:
            short, old = queue.by_size.head, queue.by_age.head
            sizes.append((short.priority, short.size, short.age, short))
            ages.append((old.age, old))
        return min(sizes)[-1], min(ages)[-1]

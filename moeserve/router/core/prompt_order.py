"""Whose prompt is served next: the fair order among prompts, waiting or under way.

Between API keys: the least served one's (`fair_share.py`). Among the prompts of a key, two lanes:

- by size: the most urgent priority, then the fewest tokens left. A short prompt does not wait for a long one that
  happened to come first, which serves most people soonest.
- by age: arrival, moved by priority. A quarter of what overtakes the oldest prompt is given to it in return,
  so that nothing waits for ever, however many come that are shorter or more urgent.

A prompt is left for another between two chunks and keeps what is computed of it.
"""

from __future__ import annotations

from collections.abc import Collection

from moeserve.router.core.fair_share import FairShare
from moeserve.router.core.request import Request
from moeserve.router.core.waiting_queue import WaitingQueue

AGED_SHARE = 0.25  # of the prompt tokens, for the oldest prompt, while others overtake it


class PromptOrder:
    def __init__(self, waiting: WaitingQueue, shares: FairShare) -> None:
        self._waiting = waiting
        self._shares = shares
        self._owed: dict[str, float] = {}  # tokens to the oldest prompt, by tenant

    def next(self, under_way: Collection[Request], *, with_waiting: bool) -> Request | None:
        """The prompt to serve now: one of `under_way`, or of those waiting if they count. None: there is none.
        Tell `served` what it got."""
        tenants = {request.tenant for request in under_way}
        if with_waiting:
            tenants.update(self._waiting.tenants)
        if not tenants:
            return None
        tenant = self._shares.least_served(tenants)
        shortest, oldest = self._heads(tenant, under_way, with_waiting)
        return oldest if self._owed.get(tenant, 0.0) > 0.0 else shortest

    def served(self, request: Request, tokens: int, under_way: Collection[Request]) -> None:
        """`request`, which `next` chose among `under_way` and those waiting, is given so many tokens."""
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
        """The first by size and the first by age."""
        mine = [request for request in under_way if request.tenant == tenant]
        sizes = [(request.priority, request.prompt_left, request.age, request) for request in mine]
        ages = [(request.age, request) for request in mine]
        lanes = self._waiting.tenants.get(tenant) if with_waiting else None
        if lanes is not None:
            short, old = lanes.by_size.head, lanes.by_age.head
            sizes.append((short.priority, short.size, short.age, short))
            ages.append((old.age, old))
        return min(sizes)[-1], min(ages)[-1]

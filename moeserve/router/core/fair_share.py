"""Who has been served how much: fair queueing between API keys, by tokens.

Each key's service is a running total of prompt tokens computed and tokens generated for it. The next prompt
to be served is one of the least served key that has any; so a key with one request passes a key with a
hundred, and keys that always have work get equal shares (start-time fair queueing, with the tokens of a
chunk as the quantum). A key that asks for little saves up a claim of at most CREDIT tokens on the keys that
ask for much, so that its next prompt is served at once. What keys were served while they were alone is no debt to one
that comes new when they have gone: it starts level with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from moeserve.router.core.request import Request

CREDIT = 16384  # tokens
SLACK = 512  # tokens of service by which two keys count as level


class FairShare:
    """Tenants are API keys by name; without keys there is one, and nothing here costs anything."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # requests
        self._served: dict[str, int] = {}  # of every tenant so far, of which there are as many as keys

    @property
    def num_tenants(self) -> int:
        """Those with open requests."""
        return len(self._open)

    def num_tenants_with(self, tenant: str) -> int:
        """The same if `tenant` had one."""
        return len(self._open) + (tenant not in self._open)

    def joined(self, tenant: str) -> None:
        """A request was opened."""
        if tenant not in self._open:
            most = max(self._served.values(), default=0)
            new = max(most - CREDIT, 0) if self._open else most
            self._served[tenant] = max(self._served.get(tenant, new), most - CREDIT)
        self._open[tenant] += 1

    def left(self, tenant: str) -> None:
        """A request was closed."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens

    def charge_rows(self, requests: Iterable[Request]) -> None:
        """One token each."""
        if len(self._open) == 1:
            return
        for tenant, rows in Counter(request.tenant for request in requests).items():
            self._served[tenant] += rows

    def least_served(self, tenants: Iterable[str]) -> str:
        return min(tenants, key=lambda tenant: (self._served[tenant], tenant))

    def protected_share(self, requests: Collection[Request], tenant: str) -> float:
        """The share of `requests` that a prompt of `tenant` must not slow down beyond their pace: those of keys
        that have not been served more."""
        level = self._served[tenant] + SLACK
        return sum(self._served[request.tenant] <= level for request in requests) / len(requests)

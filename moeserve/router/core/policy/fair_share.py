"""Fair queueing between API keys, by tokens served.

The service of a key is a running total of prompt tokens computed and tokens generated for it. The next prompt is one of
the least served key that has any. So a key with one request overtakes a key with a hundred, and keys that always have
work get equal shares (start-time fair queueing with a chunk's tokens as the quantum). A key that requests little
accumulates a credit of at most CREDIT tokens against the keys that request much, so that its next prompt is served at
once. A key that joins when no other has open requests starts level with the most served one: service that others
received while they were alone gives it no credit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from moeserve.router.core.request import Request

CREDIT = 16384  # tokens
SLACK = 512  # tokens; keys whose service differs by no more count as equally served


class FairShare:
    """A tenant is an API key's name. Without API keys there is one tenant, and no work is done here."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # requests
        self._served: dict[str, int] = {}  # tokens, of every tenant so far; bounded by the number of API keys

    @property
    def num_tenants(self) -> int:
        """Tenants with open requests."""
        return len(self._open)

    def num_tenants_with(self, tenant: str) -> int:
        """`num_tenants` if `tenant` had an open request."""
        return len(self._open) + (tenant not in self._open)

    def joined(self, tenant: str) -> None:
        """Counts a request of `tenant` that was opened."""
        if tenant not in self._open:
            most = max(self._served.values(), default=0)
            new = max(most - CREDIT, 0) if self._open else most
            self._served[tenant] = max(self._served.get(tenant, new), most - CREDIT)
        self._open[tenant] += 1

    def left(self, tenant: str) -> None:
        """Counts a request of `tenant` that has ended."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        """Adds tokens to the service of `tenant`."""
        self._served[tenant] += tokens

    def charge_rows(self, requests: Iterable[Request]) -> None:
        """Adds one token for each decode row."""
        if len(self._open) == 1:
            return
        for tenant, rows in Counter(request.tenant for request in requests).items():
            self._served[tenant] += rows

    def least_served(self, tenants: Iterable[str]) -> str:
        return min(tenants, key=lambda tenant: (self._served[tenant], tenant))

    def protected_share(self, requests: Collection[Request], tenant: str) -> float:
        """The share of decoding `requests`, 0 to 1, that a prompt of `tenant` must not slow down beyond the prefill
        budget: those of tenants that have not been served more than `tenant`, by SLACK tokens."""
        level = self._served[tenant] + SLACK
        return sum(self._served[request.tenant] <= level for request in requests) / len(requests)

"""Fair queueing between API keys, by tokens served.

A key's service is the running total of its computed prompt tokens and generated tokens. The next prompt is from the
least served key that has one. So a key with one request overtakes a key with a hundred, and keys that always have
work get equal shares (start-time fair queueing with a chunk's tokens as quantum). A key with few requests
accumulates a credit of at most CREDIT tokens relative to busy keys, so that its next prompt is served at once. A key
that joins when no other has open requests starts level with the most served one: service that others received before
gives it no credit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from moeserve.router.core.request import Request

CREDIT = 16384  # tokens
SLACK = 512  # keys whose service differs by at most this many tokens count as equally served


class FairShare:
    """Accounts for the service of each tenant (an API key's name). Without API keys there is a single tenant and
    nothing to do."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()  # open requests by tenant
        # tokens served to every tenant so far; bounded by the number of API keys
        self._served: dict[str, int] = {}

    @property
    def num_tenants(self) -> int:
        """Number of tenants with open requests."""
        return len(self._open)

    def num_tenants_with(self, tenant: str) -> int:
        """Returns `num_tenants` as if `tenant` had an open request."""
        return len(self._open) + (tenant not in self._open)

    def joined(self, tenant: str) -> None:
        """Notes a new request of `tenant`."""
        if tenant not in self._open:
            most = max(self._served.values(), default=0)
            new = max(most - CREDIT, 0) if self._open else most
            self._served[tenant] = max(self._served.get(tenant, new), most - CREDIT)
        self._open[tenant] += 1

    def left(self, tenant: str) -> None:
        """Notes the end of a request of `tenant`."""
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
        """Returns the share (0 to 1) of the decoding `requests` that are protected from a prompt of `tenant`: it may
        slow them down only within the prefill budget. Protected are requests of tenants that were served at most SLACK
        tokens more than `tenant`."""
        level = self._served[tenant] + SLACK
        return sum(self._served[request.tenant] <= level for request in requests) / len(requests)

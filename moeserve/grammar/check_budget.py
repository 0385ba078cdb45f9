"""Limits the CPU time of a tenant's grammar checks while other tenants are served.

Sixty schemas of 63 kB keep the sandbox busy for seconds, and then the worker, which compiles each again. If the engine
computes on the same cores, all answers slow down. So a tenant's checks run one after another: at full speed until they
have used BURST_S, then with pauses, so that they use SHARE of a core. Specs accepted before cost nothing, and a tenant
waits only while other tenants' answers are in progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

BURST_S: Final = 0.5
SHARE: Final = 0.2
LOOK_S: Final = 0.1  # interval of checks whether other tenants are served


@dataclass
class _Account:
    credit_s: float = BURST_S
    at: float = field(default_factory=lambda: time.monotonic())  # time at which credit_s was valid
    uses: int = 0  # checks under way or waiting
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def update(self) -> float:
        """Brings the credit up to date. Returns it in seconds of CPU time."""
        now = time.monotonic()
        self.credit_s = min(self.credit_s + (now - self.at) * SHARE, BURST_S)
        self.at = now
        return self.credit_s


class CheckBudget:
    """The budgets of all tenants. For one event loop at a time."""

    def __init__(self, serves_others: Callable[[str], bool]) -> None:
        """serves_others: takes a tenant, returns whether other tenants' answers are in progress."""
        self._serves_others = serves_others
        self._accounts: dict[str, _Account] = {}  # tenants whose credit is not full

    @asynccontextmanager
    async def turn(self, tenant: str, spent_s: Callable[[], float]) -> AsyncIterator[None]:
        """A context for one check; first waits until the tenant has credit. spent_s: a clock of CPU seconds, read
        before and after the check."""
        account = self._accounts.setdefault(tenant, _Account())
        account.uses += 1
        try:
            async with account.lock:
                while (credit := account.update()) <= 0 and self._serves_others(tenant):
                    await asyncio.sleep(min(-credit / SHARE, LOOK_S) + 1e-3)
                before = spent_s()
                try:
                    yield
                finally:
                    account.credit_s -= spent_s() - before
        finally:
            account.uses -= 1
            self._forget()

    def _forget(self) -> None:
        for tenant, account in list(self._accounts.items()):
            if account.uses == 0 and account.update() >= BURST_S:
                del self._accounts[tenant]

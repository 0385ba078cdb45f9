"""How much CPU time a tenant's grammar checks may take beside others' answers.

Sixty schemas of 63 kB keep the sandbox at work for seconds, and the worker too, which compiles each again. On a machine
whose cores the engine computes on, everybody's answers pay for it. So checks that one tenant asks for run one after
another, at full speed until it has spent BURST_S; from then on they rest, so that they take SHARE of a core. What has
passed before costs nothing, and without other tenants' answers under way no tenant waits.
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
LOOK_S: Final = 0.1  # between two looks at whether somebody else is served


@dataclass
class _Account:
    credit_s: float = BURST_S
    at: float = field(default_factory=lambda: time.monotonic())  # when the credit was so much
    uses: int = 0  # checks under way or waiting
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def update(self) -> float:
        """The credit now, in seconds of CPU time."""
        now = time.monotonic()
        self.credit_s = min(self.credit_s + (now - self.at) * SHARE, BURST_S)
        self.at = now
        return self.credit_s


class CheckBudget:
    """To be used by one event loop at a time."""

    def __init__(self, serves_others: Callable[[str], bool]) -> None:
        """`serves_others`: whether answers of another tenant than this one are under way."""
        self._serves_others = serves_others
        self._accounts: dict[str, _Account] = {}  # of tenants that are not as new

    @asynccontextmanager
    async def turn(self, tenant: str, spent_s: Callable[[], float]) -> AsyncIterator[None]:
        """Waits until the tenant may have one check. `spent_s` is read before and after it: a clock of CPU seconds."""
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

"""A line in which tenants take turns: a tenant that sends much waits behind its own work only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLine:
    """One turn at a time. Of the tenants that wait, that one is next whose last turn is longest ago; of one tenant's,
    who came first. To be used by one event loop at a time."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits for it."""
        if self._is_taken:
            await self._wait(tenant)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # its turn had just come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """To the next that has not been cancelled; the line stays taken until that one runs."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if queue:
                queue.popleft().set_result(None)
                self._waiting[tenant] = queue  # behind the others
                return
        self._is_taken = False

"""A fair queue in which tenants take turns, so that a busy tenant delays only itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLine:
    """A mutex with a fair queue. The next holder is the tenant whose last turn was longest ago; within a tenant,
    first in, first out. Not thread-safe: use it from one event loop at a time."""

    def __init__(self) -> None:
        self._is_taken = False
        # ordered: the next tenant first
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits for the tenant's turn and holds it during the context."""
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
            if mine.done() and not mine.cancelled():  # cancelled just after its turn came: pass the turn on
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Gives the turn to the next waiter that is not cancelled. The queue stays locked until that task runs."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if queue:
                queue.popleft().set_result(None)
                self._waiting[tenant] = queue  # moves the tenant to the end
                return
        self._is_taken = False

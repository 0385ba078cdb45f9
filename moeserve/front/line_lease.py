"""Lines of batches lease models as requests do, but after all requests (`schedule.py`). A line ends early if its model
must end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import Instance, PooledModel, Ticket


@asynccontextmanager
async def lease_for_line(pool: ModelPool, model: PooledModel) -> AsyncIterator[Instance]:
    """Waits until the model is loaded, and yields the model's server for one line. The batch's runner cancels the wait
    when the batch is late or cancelled. The line must end when `model.sends_lines_back` is set. Raises ApiError if the
    model cannot be loaded."""
    await pool.refuse_if_hopeless(model)
    ticket = Ticket(asyncio.get_running_loop().create_future(), pool.now, pool.num_swaps)
    model.line_tickets.append(ticket)
    pool.look_at_file(model)
    pool.turn()
    try:
        instance = await ticket.future
    except asyncio.CancelledError:
        if ticket.has_instance:
            _release(pool, model, ticket.future.result())
        raise
    finally:
        if ticket in model.line_tickets:
            model.line_tickets.remove(ticket)
            pool.turn()
    try:
        yield instance
    finally:
        _release(pool, model, instance)


def _release(pool: ModelPool, model: PooledModel, instance: Instance) -> None:
    if model.instance is instance:  # otherwise another server has replaced it
        model.num_lines -= 1
        model.lines_ended = pool.now
    pool.turn()

"""Checks that the queue has room for a request's generations, before any other work on the request."""

from __future__ import annotations

from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.transport.errors import invalid


def check_room(asked: Asked, most: int, room: QueueRoom, running: int) -> None:
    """Raises ApiError 400 if the request asks for more than `most` generations, and 503 if the queue has no room for
    them now. running: the most generations that can run at once; these do not count as waiting."""
    if (total := asked.num_prompts * asked.n) > most:
        message = f"{asked.num_prompts} prompts with {asked.n} choices each are {total}; at most {most} fit"
        raise invalid("n", message)
    if asked.caller.is_background:
        return  # the batches' runner bounds the number of open ones
    wanted = asked.num_prompts if asked.beams is not None else total
    room.check(asked.caller.tenant, wanted, running)

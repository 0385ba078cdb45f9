"""Whether there is room for a request's generations, before any other work on it."""

from __future__ import annotations

from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.transport.errors import invalid


def check_room(asked: Asked, most: int, room: QueueRoom, running: int) -> None:
    """Raises ApiError 400 where the request asks for more than the `most` generations that there can be, and 503 where
    the queue has no room for them now. `running` generations at most do not wait there."""
    if (total := asked.num_prompts * asked.n) > most:
        message = f"{asked.num_prompts} prompts with {asked.n} choices each are {total}; at most {most} fit"
        raise invalid("n", message)
    wanted = asked.num_prompts if asked.beams is not None else total
    room.check(asked.caller.tenant, wanted, running)

"""Which requests the router's queue has no room for."""

from __future__ import annotations

from array import array

from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.beams import BeamParams
from moeserve.messages.refusal import Refusal
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest

RUNNING = 8  # requests at once, of the harness's engine
QUEUED = 64


def request(id: int, key: str, beams: BeamParams | None = None) -> GenerateRequest:
    prompt = array("i", [1]).tobytes()
    return GenerateRequest(id, prompt, SamplingParams(1), TextOptions(), 0.0, key_name=key, beams=beams)


def refusal(room: QueueRoom, key: str, wanted: int) -> ApiError | None:
    try:
        room.check(key, wanted, RUNNING)
    except ApiError as error:
        return error
    return None


def test_only_what_the_router_would_refuse_is_refused() -> None:
    room = QueueRoom(QUEUED)
    assert refusal(room, "", QUEUED + RUNNING) is None
    assert refusal(room, "", QUEUED + RUNNING + 1) is not None
    held = [request(id, "a") for id in range(30)]
    for one in held:
        room.joined(one)
    # Of two keys with the next one's each has a third of the queue, of one a half.
    assert refusal(room, "a", QUEUED // 2 + RUNNING - 30) is None
    error = refusal(room, "a", QUEUED // 2 + RUNNING - 30 + 1)
    assert error is not None
    assert (error.status, error.refusal, error.retry_after) == (503, Refusal.QUOTA, 1)
    assert refusal(room, "b", QUEUED // 3) is None
    room.refused(retry_after=7)
    error = refusal(room, "a", 1000)
    assert error is not None
    assert (error.refusal, error.retry_after) == (Refusal.QUEUE_FULL, 7)
    for one in held:
        room.left(one)
    assert room.is_empty
    assert refusal(room, "a", QUEUED // 2 + RUNNING) is None


def test_a_search_is_one_request_of_the_router() -> None:
    room = QueueRoom(QUEUED)
    for choice in range(100):
        room.joined(request(choice, "", BeamParams(1, choice, 100, 100)))
    assert refusal(room, "", QUEUED + RUNNING - 1) is None

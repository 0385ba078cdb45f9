"""API keys beside one another, and the bounds of the queue."""

from __future__ import annotations

import pytest

from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import RequestError
from moeserve.router.core.policy.back_pressure import LEAST_WAIT_S
from moeserve.router.core.policy.fair_share import CREDIT, FairShare
from tests.support.router.router_world import request
from tests.support.router.virtual_engine import Stream, VirtualEngine


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def light_users(engine: VirtualEngine, start: float, rounds: int = 12) -> list[Stream]:
    """Three keys that ask one question after another, and think in between."""
    streams: list[Stream] = []
    for turn in range(rounds):
        for user in range(3):
            engine.run(until=start + 6.0 * turn + 2.0 * user)
            engine.now = max(engine.now, start + 6.0 * turn + 2.0 * user)  # where nothing is left to do
            id = 1000 + 10 * turn + user
            message = request(id, 800, 20, arrival=engine.now, key_name=f"light-{user}")
            streams.append(engine.send(message))
    engine.run(until=engine.now + 60.0)
    return streams


def test_a_greedy_key_does_not_hold_up_the_light_ones() -> None:
    alone = [stream.ttft for stream in light_users(VirtualEngine(), start=0.0)]
    engine = VirtualEngine()
    for id in range(64):
        engine.send(request(id, 400, 4000, arrival=engine.now, key_name="greedy"))
    engine.run(until=150.0)
    assert engine.scheduler.load_report().num_running == 64
    beside = [stream.ttft for stream in light_users(engine, start=150.0)]
    assert percentile(beside, 0.95) <= 1.5 * percentile(alone, 0.95)
    assert engine.scheduler.load_report().preemptions > 0, "a place was made, for all were taken"


def test_without_keys_all_are_alike() -> None:
    engine = VirtualEngine(max_num_seqs=4)
    streams = [engine.send(request(id, 100, 50, arrival=0.0)) for id in range(12)]
    engine.run()
    assert all(stream.ended is not None for stream in streams)
    assert engine.scheduler.load_report().preemptions == 0


def test_keys_that_always_ask_get_equal_shares() -> None:
    """One sends short prompts, the other long ones; each as many as can be."""
    engine = VirtualEngine(max_num_seqs=8, max_num_queued_reqs=10_000)
    for id in range(800):
        engine.send(request(id, 200, 1, arrival=0.0, key_name="short"))
    for id in range(800, 840):
        engine.send(request(id, 4000, 1, arrival=0.0, key_name="long"))
    engine.run(until=100.0)
    short = 200 * sum(engine.streams[id].ended is not None for id in range(800))
    long = 4000 * sum(engine.streams[id].ended is not None for id in range(800, 840))
    assert 0.8 < short / long < 1.25


def test_making_way_stops_at_equal_shares() -> None:
    engine = VirtualEngine(max_num_seqs=8)
    for id in range(8):
        engine.send(request(id, 50, 5000, arrival=0.0, key_name="a"))
    engine.run(until=2.0)
    for id in range(8, 16):
        engine.send(request(id, 50, 5000, arrival=engine.now, key_name="b"))
    engine.run(until=20.0)
    running = [r.tenant for r in engine.scheduler._batch.running.values()]
    assert running.count("a") == running.count("b") == 4
    assert engine.scheduler.load_report().preemptions == 4, "each gave way once, and nobody again"


def test_a_key_that_was_away_has_a_claim_of_so_many_tokens_and_no_more() -> None:
    shares = FairShare()
    shares.joined("busy")
    shares.charge("busy", 1_000_000)
    shares.joined("new")
    assert shares.least_served(["busy", "new"]) == "new"
    shares.charge("new", CREDIT - 1)
    assert shares.least_served(["busy", "new"]) == "new"
    shares.charge("new", 2)
    assert shares.least_served(["busy", "new"]) == "busy"
    shares.left("new")
    shares.joined("new")
    assert shares.least_served(["busy", "new"]) == "busy", "leaving for a moment wipes nothing out"


# -------------------------------------------------------------------- back-pressure


def refusals(engine: VirtualEngine) -> list[RequestError]:
    return [m for m in engine.scheduler.take_messages() if isinstance(m, RequestError)]


def test_too_many_waiting_tokens_get_a_503() -> None:
    engine = VirtualEngine(max_num_queued_tokens=1000)
    for id in range(3):
        engine.send(request(id, 400, 10, arrival=0.0))
    (error,) = refusals(engine)
    assert (error.id, error.status, error.refusal) == (2, 503, Refusal.QUEUE_FULL)
    assert "800 prompt tokens are waiting" in error.message


def test_an_empty_queue_takes_a_prompt_of_any_size() -> None:
    engine = VirtualEngine(max_num_queued_tokens=1000)
    stream = engine.send(request(0, 5000, 1, arrival=0.0))
    engine.run()
    assert stream.ended is not None


@pytest.mark.parametrize("prompt", [2000, 20])
def test_retry_after_is_the_time_that_the_queue_takes(prompt: int) -> None:
    """Most of it goes into prompts, or into answers."""
    engine = VirtualEngine(max_num_seqs=4, max_num_queued_reqs=40)
    for id in range(100, 140):  # so that the length of answers is known
        engine.send(request(id, 20, 200, arrival=0.0), length=200)
    engine.run()
    for id in range(1, 42):
        engine.send(request(id, prompt, 200, arrival=engine.now), length=200)
    (error,) = refusals(engine)
    assert error.status == 503
    assert error.retry_after is not None
    assert str(error.retry_after) in error.message
    refused_at = engine.now
    engine.run()
    assert 0.5 < error.retry_after / (engine.now - refused_at) < 2.5


def test_retry_after_where_the_pool_holds_fewer_requests_than_there_are_slots() -> None:
    """A full batch's speed was assumed, which one request at a time does not reach."""
    engine = VirtualEngine(max_num_seqs=64, max_num_queued_reqs=20, num_kv_slots=450)
    for id in range(21):
        engine.send(request(id, 40, 400, arrival=engine.now), length=400)
        for _ in range(8):
            engine.turn()
    engine.send(request(21, 40, 400, arrival=engine.now))
    engine.send(request(22, 40, 400, arrival=engine.now))
    error = refusals(engine)[0]
    assert error.retry_after is not None
    refused_at = engine.now
    engine.run()
    assert 0.5 < error.retry_after / (engine.now - refused_at) < 2


def test_retry_after_before_anything_was_measured() -> None:
    engine = VirtualEngine(max_num_queued_reqs=1)
    for id in range(2):
        engine.send(request(id, 20, 10, arrival=0.0))
    (error,) = refusals(engine)
    assert (error.retry_after, error.refusal) == (LEAST_WAIT_S, Refusal.QUEUE_FULL)


def test_one_key_cannot_fill_the_queue() -> None:
    engine = VirtualEngine(max_num_queued_reqs=30)
    for id in range(30):
        engine.send(request(id, 20, 10, arrival=0.0, key_name="greedy"))
    refused = refusals(engine)
    assert len(refused) == 15
    assert "of this API key" in refused[0].message
    assert refused[0].refusal is Refusal.QUOTA
    for id in range(100, 110):
        engine.send(request(id, 20, 10, arrival=0.0, key_name="light"))
    assert refusals(engine) == []

"""Background requests beside others, in virtual time: whose speed they leave alone, and that they end all the same."""

from __future__ import annotations

import itertools

from moeserve.messages.schema import BACKGROUND_PRIORITY
from tests.support.router.router_world import request
from tests.support.router.virtual_engine import Stream, VirtualEngine

STREAMS = 8


def background(id: int, engine: VirtualEngine, max_tokens: int = 20) -> Stream:
    return engine.send(request(id, 40, max_tokens, arrival=engine.now, priority=BACKGROUND_PRIORITY))


def speed(streams: list[Stream], start: float, end: float) -> float:
    """Tokens a second of all streams."""
    return sum(start <= t < end for stream in streams for t in stream.tokens) / (end - start)


def interactive(engine: VirtualEngine, max_tokens: int = 30_000) -> list[Stream]:
    return [engine.send(request(id, 20, max_tokens, arrival=engine.now)) for id in range(STREAMS)]


def test_interactive_streams_keep_nine_tenths_of_their_speed() -> None:
    engine = VirtualEngine()
    streams = interactive(engine)
    engine.run(until=10.0)
    alone = speed(streams, 5.0, 10.0)
    ids = itertools.count(100)
    batch = [background(next(ids), engine) for _ in range(32)]
    while engine.now < 60.0:
        engine.turn()
        for _ in range(sum(one.ended is None for one in batch), 32):  # as a batch's runner does
            batch.append(background(next(ids), engine))
    assert speed(streams, 20.0, 60.0) >= 0.9 * alone
    done = sum(one.ended is not None for one in batch)
    assert done >= 5, "the share is used"


def test_alone_they_have_the_whole_engine() -> None:
    times = []
    for priority in (0, BACKGROUND_PRIORITY):
        engine = VirtualEngine()
        for id in range(64):
            engine.send(request(id, 40, 50, arrival=0.0, priority=priority))
        engine.run()
        times.append(engine.now)
    assert times[1] < 1.02 * times[0]


def test_another_request_takes_their_places_at_once() -> None:
    """All request slots and nearly all KV slots are theirs."""
    engine = VirtualEngine(max_num_seqs=4, num_kv_slots=1000, max_model_len=1000)
    batch = [background(id, engine, max_tokens=150) for id in range(8)]
    engine.run(until=1.0)
    began = engine.now
    asked = engine.send(request(100, 600, 20, arrival=began))
    while asked.ended is None:
        engine.turn()
    idle = VirtualEngine(max_num_seqs=4, num_kv_slots=1000, max_model_len=1000)
    alone = idle.send(request(100, 600, 20, arrival=0.0))
    idle.run()
    assert alone.ended is not None
    assert asked.ended - began < 2.0 * alone.ended
    engine.run()
    assert all(one.ended is not None and len(one.tokens) == 150 for one in batch), "none is lost"
    engine.scheduler.check()


def test_a_full_queue_of_theirs_refuses_no_other() -> None:
    engine = VirtualEngine(max_num_seqs=2, max_num_queued_reqs=4)
    for id in range(10):
        background(id, engine)
    others = [engine.send(request(id, 20, 5, arrival=engine.now)) for id in range(100, 103)]
    engine.run()
    assert all(len(other.tokens) == 5 for other in others)

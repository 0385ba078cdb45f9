"""What the router tells of prompts while they are read, to those who asked."""

from __future__ import annotations

from moeserve.messages.schema import PrefillProgress
from moeserve.router.core.limits import Limits
from tests.support.router.router_world import World, request


def make(num_kv_slots: int = 1000, max_num_batched_tokens: int = 10) -> World:
    return World(Limits(num_kv_slots, 8, num_kv_slots, max_num_batched_tokens, 100))


def counts(world: World, id: int) -> list[tuple[int, int, int]]:
    """(total, cached, done) of each message."""
    return [(one.total, one.cached, one.done) for one in world.seen[id].progress]


def test_each_step_of_a_prompt_tells_how_far_it_has_come() -> None:
    world = make()
    world.add(request(0, prompt=25, max_tokens=3, progress=True))
    world.run()
    assert counts(world, 0) == [(25, 0, 10), (25, 0, 20), (25, 0, 25)]
    times = [one.ms for one in world.seen[0].progress]
    assert times == sorted(times)
    assert times[0] >= 0
    assert len(world.seen[0].tokens) == 3


def test_nobody_is_told_who_did_not_ask() -> None:
    world = make()
    world.add(request(0, prompt=25, max_tokens=3))
    world.add(request(1, prompt=15, max_tokens=3, progress=True))
    world.run()
    assert world.seen[0].progress == []
    assert counts(world, 1)[-1] == (15, 0, 15)


def test_what_the_cache_had_counts_from_the_start() -> None:
    world = make()
    prompt = list(range(1, 31))
    world.add(request(0, prompt=prompt, max_tokens=1))
    world.run()
    world.add(request(1, prompt=[*prompt, *range(50, 65)], max_tokens=1, progress=True))
    world.run()
    assert counts(world, 1) == [(45, 30, 40), (45, 30, 45)]


def test_a_prompt_that_is_scored_alone_is_told_of_too() -> None:
    world = make()
    world.add(request(0, prompt=12, max_tokens=0, progress=True))
    world.run()
    assert counts(world, 0) == [(12, 0, 10), (12, 0, 12)]


def test_an_answer_that_is_preempted_tells_nothing_when_it_is_computed_again() -> None:
    world = make(num_kv_slots=100, max_num_batched_tokens=16)
    for _ in range(200):
        world.scheduler._history.add(2)  # answers are short, as far as the scheduler knows
    for id in range(2):
        world.add(request(id, prompt=10, max_tokens=60, progress=True))
    world.run()
    assert world.scheduler.load_report().preemptions > 0
    assert [counts(world, id) for id in range(2)] == [[(10, 0, 10)], [(10, 0, 6), (10, 0, 10)]]


def test_an_aborted_request_gets_no_more() -> None:
    world = make()
    world.add(request(0, prompt=25, max_tokens=3, progress=True))
    world.plan()
    world.result()
    seen: list[PrefillProgress] = list(world.seen[0].progress)
    world.plan()
    world.abort(0)
    world.result()
    assert world.seen[0].progress == seen
    assert len(seen) == 1

"""Beam searches in the scheduler: what they hold, how they end, and that nothing around them changes their answers."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from moeserve.messages.beams import BeamParams
from moeserve.messages.schema import DetokenizeEnd, GenerateRequest, RequestError, TokensItem
from moeserve.router.core.beams.beam_search import BeamSearch
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.window_memory import least_slots
from tests.support.router.checking_worker import STOP_TOKEN, ints, top_tokens
from tests.support.router.router_world import World, final_error, final_item, make_world, request, rows_of
from tests.support.worker.beams import Wanted, requests

PROMPT = [5, 6, 7, 8, 9]


def add_search(world: World, id: int, prompt: list[int], wanted: Wanted, key_name: str = "") -> None:
    for message in requests(id, prompt, wanted, key_name=key_name):
        world.add(message)


def expected(prompt: list[int], wanted: Wanted) -> list[tuple[list[int], float]]:
    """The answers of a search by itself: each one's tokens without its end, and its score."""
    (message, *_) = requests(0, prompt, wanted)
    assert message.beams is not None
    it = BeamSearch(message.beams, message.sampling)
    beams = [list(prompt)]
    while beams:
        continued = it.advance([top_tokens(beam, it.num_candidates) for beam in beams])
        beams = [[*beams[row], token] for row, token in continued]
    found = it.answers()[: wanted.num_return_sequences]
    return [([one.token_id for one in answer.text()], answer.score) for answer in found]


def answers(world: World, id: int, wanted: Wanted) -> list[tuple[list[int], float]]:
    found = []
    for choice in range(wanted.num_return_sequences):
        final = final_item(world, id + choice)
        assert final.score is not None
        assert final.usage is not None
        is_stop = final.finish_reason == "stop"
        assert final.stop_token == (STOP_TOKEN if is_stop else None)
        assert final.usage.completion_tokens == len(final.token_ids) + is_stop
        found.append((final.token_ids, final.score))
    return found


@pytest.mark.parametrize("num_state_slots", [0, 8], ids=["attention", "recurrent"])
@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(2),
        Wanted(4, 4, eos_token_id=(STOP_TOKEN,)),
        Wanted(8, 3, 12, 0.0, "never", 2, (STOP_TOKEN,)),
        Wanted(6, 6, 9, 1.0, True, 0, (STOP_TOKEN,), num_beam_groups=3, diversity_penalty=0.7),
    ],
    ids=["two", "ends", "never", "groups"],
)
def test_a_search_finds_what_it_finds_by_itself(wanted: Wanted, num_state_slots: int) -> None:
    """The worker asserts that each row reads the KV and the state of exactly the tokens of its beam."""
    world = make_world(num_state_slots=num_state_slots)
    add_search(world, 1, PROMPT, wanted)
    world.run()
    assert answers(world, 1, wanted) == expected(PROMPT, wanted)
    world.check_all_free()
    report = world.scheduler.load_report()
    assert (report.beam_searches, report.beam_restarts) == (1, 0)
    assert report.beam_forks >= wanted.num_beams - 1
    assert report.kv_slots_cached == len(PROMPT)


def test_beams_share_slots_and_free_them_as_they_are_given_up() -> None:
    world = make_world()
    wanted = Wanted(4, 4, max_new_tokens=20)
    add_search(world, 1, PROMPT, wanted)
    most = 0
    while world.plan() is not None:
        world.result()
        world.check()
        most = max(most, world.scheduler.load_report().kv_slots_used)
    assert len(PROMPT) + 20 < most < len(PROMPT) + 4 * 19
    assert world.worker.computed == len(PROMPT) + 4 * 19


def test_requests_of_one_search_run_as_one() -> None:
    """The search begins with the last of its requests, and has a row for each beam from its second step on."""
    world = make_world()
    first, second = requests(1, PROMPT, Wanted(3, 2))
    world.add(second)
    assert world.plan() is None
    world.add(first)
    assert rows_of(world.plan()) == [(0, 5, True)]
    assert world.plan() is None, "its beams are not known yet"
    world.result()
    assert rows_of(world.plan()) == [(5, 1, True)] * 3
    assert world.scheduler.load_report().num_running == 1


def test_others_decode_while_a_search_awaits_its_results() -> None:
    world = make_world()
    world.add(request(50, prompt=3, max_tokens=20))
    world.plan()
    world.result()
    wanted = Wanted(3)
    add_search(world, 1, PROMPT, wanted)
    world.plan()
    assert len(rows_of(world.plan())) == 1
    world.run()
    assert answers(world, 1, wanted) == expected(PROMPT, wanted)
    assert world.seen[50].tokens == list(range(100, 120))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("planned", [False, True])
def test_an_abort_of_one_answer_ends_the_search(steps: int, planned: bool) -> None:
    world = make_world(max_num_batched_tokens=8, num_state_slots=8)
    add_search(world, 1, PROMPT, Wanted(3, 2, max_new_tokens=50))
    for _ in range(steps):
        world.plan()
        world.result()
    if planned:
        world.plan()
    world.abort(2)
    world.abort(1)
    assert world.scheduler.load_report().kv_slots_used == 0
    assert [type(world.seen[id].final) for id in (1, 2)] == [DetokenizeEnd, DetokenizeEnd]
    assert world.scheduler.load_report().aborts == 1
    world.run()
    world.check_all_free()


def test_a_search_whose_requests_never_all_come_leaves_nothing() -> None:
    world = make_world()
    first, second, third = requests(1, PROMPT, Wanted(3, 3))
    world.add(first)
    world.add(third)
    world.abort(1)
    world.abort(3)
    assert world.scheduler.is_idle
    world.add(second)
    assert world.plan() is None
    world.die()
    assert final_error(world, 2).status == 503


def test_the_server_s_end_is_told_to_each_request() -> None:
    world = make_world()
    add_search(world, 1, PROMPT, Wanted(3, 2))
    world.plan()
    world.die()
    assert [final_error(world, id).status for id in (1, 2)] == [503, 503]
    add_search(world, 11, PROMPT, Wanted(3, 2))
    assert [final_error(world, id).status for id in (11, 12)] == [503, 503]


@pytest.mark.parametrize("searches", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_aborts_leave_nothing(searches: int) -> None:
    rng = random.Random(0)
    world = make_world(num_kv_slots=200, num_state_slots=10, max_num_batched_tokens=8)
    ids = range(10, 10 * searches + 10, 10)
    for id in ids:
        wanted = Wanted(rng.randint(1, 4), 1, 30, eos_token_id=(STOP_TOKEN,))
        add_search(world, id, [rng.randrange(3) for _ in range(rng.randint(1, 9))], wanted)
        for _ in range(rng.randrange(8)):
            world.plan()
            if rng.random() < 0.8:
                world.result()
        if rng.random() < 0.5:
            world.plan()
        for old in [*range(10, id + 10, 10)][-2:] if rng.random() < 0.5 else [id]:
            world.abort(old)
        if id % 500 == 0:
            world.check()
    for id in ids:
        world.abort(id)
    report = world.scheduler.load_report()
    assert report.aborts > 0.8 * searches
    assert (report.kv_slots_used, report.state_slots_running, report.num_running) == (0, 0, 0)
    world.run()
    world.check_all_free()
    world.check()


@pytest.mark.parametrize(
    ("wanted", "prompt", "cause"),
    [
        (Wanted(9), 5, "9 beams are more than the 8 sequences"),
        (
            Wanted(8, max_new_tokens=20),
            50,
            "8 beams of max_tokens 20 may need 210 KV slots; this server has 200",
        ),
    ],
)
def test_a_search_that_never_fits_is_refused(wanted: Wanted, prompt: int, cause: str) -> None:
    world = make_world(num_kv_slots=200)
    add_search(world, 1, list(range(prompt)), wanted)
    assert final_error(world, 1).status == 400
    assert cause in final_error(world, 1).message


def test_a_lost_worker_has_the_search_begin_again() -> None:
    world = make_world(num_state_slots=8)
    wanted = Wanted(4, 2, 10, eos_token_id=(STOP_TOKEN,))
    add_search(world, 1, PROMPT, wanted)
    for _ in range(4):
        world.plan()
        world.result()
    world.plan()
    world.lose_worker()
    world.find_worker(crashed_by_itself=False)
    world.run()
    assert answers(world, 1, wanted) == expected(PROMPT, wanted)
    assert world.scheduler.load_report().beam_restarts == 1
    world.check_all_free()


def test_requests_that_come_again_under_other_ids_are_the_search() -> None:
    """A lost detokenizer: httpserver aborts each open request and sends it again, one after the other."""
    world = make_world()
    wanted = Wanted(3, 2)
    messages = requests(1, PROMPT, wanted)
    for message in messages:
        world.add(message)
    for _ in range(3):
        world.plan()
        world.result()
    for message in messages:
        world.abort(message.id)
        world.add(replace(message, id=message.id + 100))
    world.run()
    assert answers(world, 101, wanted) == expected(PROMPT, wanted)
    world.check_all_free()


def test_a_search_that_crashes_workers_is_found_out() -> None:
    """At its third step, every time, beside another request that does not."""
    world = make_world()
    add_search(world, 1, PROMPT, Wanted(3, 2))
    world.add(request(50, prompt=3, max_tokens=400))
    for _ in range(4):
        while not isinstance(world.seen[1].final, RequestError):
            plan = world.plan() or world.plan()
            if plan is not None and any(row.start == len(PROMPT) + 2 for row in plan.rows):
                world.lose_worker()
                world.find_worker()
                break
            world.result()
    assert "crashed" in final_error(world, 1).message
    assert isinstance(world.seen[2].final, RequestError)
    world.run()
    assert len(world.seen[50].tokens) == 400


def life(
    seed: int, window: int = 0
) -> tuple[World, dict[int, tuple[list[int], Wanted]], dict[int, GenerateRequest]]:
    """Searches and ordinary requests in a pool that is always short, with aborts and lost workers. window: windowed
    layers have a KV pool of their own, that running requests may fill."""
    rng = random.Random(seed)
    limits = Limits(
        num_kv_slots=rng.randint(40, 90),
        max_num_seqs=rng.randint(4, 10),
        max_model_len=30,
        max_num_batched_tokens=rng.randint(4, 16),
        max_num_queued_reqs=100,
        reuse_prefixes=rng.random() < 0.8,
        isolate_tenants=rng.random() < 0.3,
        num_state_slots=rng.choice([0, 0, 6, 16]),
        page_tokens=rng.choice([0, 0, 2]),
    )
    if window:
        none: dict[str, Any] = {"num_state_slots": 0, "page_tokens": 0}
        limits = dataclasses.replace(limits, **none)  # without state slots, more may run at once
        slots = least_slots(window, limits.max_running, limits.max_num_batched_tokens)
        limits = dataclasses.replace(limits, num_window_slots=slots, window=window)
    world = World(limits, lambda _: rng.choice([0.0, 1.0, 150.0]))
    searches: dict[int, tuple[list[int], Wanted]] = {}
    ordinary: dict[int, GenerateRequest] = {}
    id = 0
    for kind in rng.choices(["search", "add", "turn", "plan", "abort", "lose"], [2, 2, 8, 1, 0.4, 0.3], k=80):
        id += 10
        if kind == "search":
            size, groups = rng.randint(1, 3), rng.choice([1, 1, 1, 2])
            wanted = Wanted(
                size * groups,
                rng.randint(1, size * groups),
                rng.randint(1, 8),
                rng.choice([0.0, 1.0, 2.0]),
                rng.choice([True, False, "never"]),
                rng.randint(0, 2),
                (STOP_TOKEN,) * rng.randint(0, 1),
                groups,
                0.5 * (groups > 1),
            )
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            searches[id] = prompt, wanted
            add_search(world, id, prompt, wanted, rng.choice(["", "a", "b"]))
        elif kind == "add":
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            ordinary[id] = request(id, prompt, rng.randint(1, 12), key_name=rng.choice(["", "a", "b"]))
            world.add(ordinary[id])
        elif kind == "abort":
            world.abort(rng.choice([*searches, *ordinary, 0]))
        elif kind == "lose":
            world.lose_worker()
            world.find_worker(crashed_by_itself=False)
        elif kind == "plan":
            world.plan()
        else:
            while world.plan() is not None:
                pass
            world.result()
        world.check()
    world.run()
    world.check_all_free()
    return world, searches, ordinary


# Together they execute each branch of the router core that any of the first 40 does.
BRANCHY_SEEDS = (2, 3, 5, 8, 13, 17, 23, 36, 39)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(BRANCHY_SEEDS, id="branchy"),
        pytest.param(range(1000), id="thousand", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("window", [0, 3, 6])
def test_random_lives(seeds: Sequence[int], window: int) -> None:
    """Nobody is forgotten, nothing leaks, and every answer is the one that the request would get alone."""
    restarts = found = 0
    for seed in seeds:
        world, searches, ordinary = life(seed, window)
        for id, (prompt, wanted) in searches.items():
            finals = [world.seen[id + choice].final for choice in range(wanted.num_return_sequences)]
            assert None not in finals, f"seed {seed}: {id} was forgotten"
            if isinstance(finals[0], TokensItem):
                found += 1
                assert answers(world, id, wanted) == expected(prompt, wanted), f"seed {seed}: {id}"
            elif isinstance(finals[0], RequestError):
                assert finals[0].status in (400, 500), f"seed {seed}: {id}"
        for id, message in ordinary.items():
            if isinstance(world.seen[id].final, TokensItem):
                assert world.seen[id].tokens == list(range(100, 100 + message.sampling.max_tokens))
        restarts += world.scheduler.load_report().beam_restarts
    assert found > 5 * len(seeds)
    assert restarts > len(seeds) / 4


def test_answers_of_one_prompt_share_its_kv() -> None:
    """`n` requests of one prompt compute it once: its last token alone is each one's own."""
    for prompt in (list(range(300)), list(range(7))):
        world = make_world(num_kv_slots=2000, max_num_batched_tokens=64)
        for id in range(6):
            world.add(request(id, prompt, 4, arrival=0.0))
        most = 0
        while world.plan() is not None or world.in_flight:
            world.result()
            most = max(most, world.scheduler.load_report().kv_slots_used)
        assert world.worker.computed == len(prompt) - 1 + 6 * (1 + 3)
        assert most <= len(prompt) - 1 + 6 * (1 + 3)


def test_the_search_s_parameters_travel() -> None:
    """What the worker is asked of each beam: greedy tokens, as many top ones as the search needs."""
    world = make_world()
    wanted = Wanted(3, eos_token_id=(STOP_TOKEN,))
    for message in requests(1, PROMPT, wanted, adapter="a"):
        world.add(message)
    plan = world.plan()
    assert plan is not None
    first, *others = plan.new_seqs
    assert (ints(first.token_ids), len(others)) == (PROMPT, 2)
    assert all((seq.sampling, seq.adapter) == (first.sampling, "a") for seq in others)
    assert (first.sampling.temperature, first.sampling.logprobs) == (0.0, 4)
    assert array("i", first.token_ids).tolist() == PROMPT
    assert BeamParams(1, 0, 1, 3) == requests(1, PROMPT, wanted)[0].beams

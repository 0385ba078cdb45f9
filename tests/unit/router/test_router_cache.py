"""Prefix reuse and preemption through the scheduler. The worker of `router_world` asserts of every slot it reads that
it holds the right tokens' KV, so a test need only say how much is computed."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.messages.schema import DetokenizeEnd, RequestError, TokensItem
from moeserve.router.core.limits import Limits
from tests.support.router.checking_worker import STOP_TOKEN
from tests.support.router.router_world import World, request

PROMPT = list(range(1000, 1040))


def make(**limits: object) -> World:
    defaults = {
        "num_kv_slots": 1000,
        "max_num_seqs": 8,
        "max_model_len": 500,
        "max_num_batched_tokens": 64,
        "max_num_queued_reqs": 100,
    }
    return World(Limits(**(defaults | limits)))  # type: ignore[arg-type]


def computed(world: World) -> int:
    """Positions computed since the last call."""
    before, world.worker.computed = world.worker.computed, 0
    return before


def cached(world: World, id: int) -> int:
    final = world.seen[id].final
    assert isinstance(final, TokensItem)
    assert final.usage is not None
    return final.usage.cached_tokens


def ask(world: World, id: int, prompt: list[int], max_tokens: int = 4, **more: object) -> int:
    """Runs one request alone; returns its cached tokens."""
    world.add(request(id, prompt, max_tokens, **more))  # type: ignore[arg-type]
    world.run()
    return cached(world, id)


# -------------------------------------------------------------------- reuse


def test_a_prompt_is_computed_once_but_for_its_last_token() -> None:
    world = make()
    assert ask(world, 0, PROMPT, max_tokens=1) == 0
    assert computed(world) == 40
    assert ask(world, 1, PROMPT, max_tokens=1) == 39
    assert computed(world) == 1
    report = world.scheduler.load_report()
    assert (report.prompt_tokens, report.cached_tokens) == (80, 39)


def test_a_conversation_computes_only_what_is_new() -> None:
    world = make()
    conversation = PROMPT
    for turn in range(5):
        hit = ask(world, turn, conversation, max_tokens=10)
        assert hit == (0 if turn == 0 else len(conversation) - 5 - 1), "all but the new turn and one token"
        # The last token of an answer was never computed.
        conversation = conversation + world.seen[turn].tokens + [2000 + turn] * 5
    world.check_all_free()


def test_requests_that_come_together_share_at_once() -> None:
    """Even within one step: the worker writes all KV of a layer before anything reads it."""
    world = make(max_num_batched_tokens=100)
    for id in range(5):
        world.add(request(id, PROMPT, 3))
    plan = world.plan()
    assert plan is not None
    assert [row.count for row in plan.rows] == [40, 1, 1, 1, 1]
    world.run()
    assert [cached(world, id) for id in range(5)] == [0, 39, 39, 39, 39]


def test_choices_of_one_prompt_share_it_while_it_is_computed() -> None:
    world = make(max_num_batched_tokens=16)
    for id in range(4):
        world.add(request(id, PROMPT, 3))
    world.run()
    assert computed(world) < 40 + 4 * 3 + 5


def test_what_an_abort_computed_is_kept() -> None:
    world = make(max_num_batched_tokens=16)
    world.add(request(0, PROMPT, 50))
    world.plan()
    world.plan()
    world.abort(0)
    assert isinstance(world.seen[0].final, DetokenizeEnd)
    world.run()
    assert ask(world, 1, PROMPT) == 32


def test_what_gave_non_finite_logits_is_not_kept() -> None:
    world = make()
    world.add(request(0, PROMPT, 5), script=[7, -1])
    world.run()
    assert isinstance(world.seen[0].final, RequestError)
    assert ask(world, 1, PROMPT) == 0


@pytest.mark.parametrize(
    ("limits", "first", "second", "hit"),
    [
        ({}, {}, {}, 39),
        ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, 39),
        ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({}, {"adapter": "a"}, {"adapter": "a"}, 39),
        ({}, {"adapter": "a"}, {"adapter": "b"}, 0),
        ({}, {"adapter": "a"}, {}, 0),
        ({}, {"adapter": "a"}, {"cache_salt": "a"}, 0),
        ({}, {"key_name": "a"}, {"key_name": "b"}, 39),
        ({"isolate_tenants": True}, {"key_name": "a"}, {"key_name": "b"}, 0),
        ({"isolate_tenants": True}, {"key_name": "a"}, {"key_name": "a"}, 39),
        ({"reuse_prefixes": False}, {}, {}, 0),
        ({}, {}, {"prompt_logprobs": 0}, 0),
    ],
)
def test_who_shares_with_whom(
    limits: dict[str, Any], first: dict[str, Any], second: dict[str, Any], hit: int
) -> None:
    world = make(**limits)
    ask(world, 0, PROMPT, **first)
    assert ask(world, 1, PROMPT, **second) == hit
    world.check_all_free()


def test_a_full_pool_forgets_what_was_used_longest_ago() -> None:
    world = make(num_kv_slots=200, max_model_len=60)
    prompts = [[1000 * i + n for n in range(40)] for i in range(4)]
    for id, prompt in enumerate(prompts):
        ask(world, id, prompt)
    assert ask(world, 4, prompts[0]) == 39, "the oldest, used again"
    for id in range(5, 8):
        ask(world, id, [10_000 * id + n for n in range(40)])
    assert ask(world, 8, prompts[0]) == 39
    assert ask(world, 9, prompts[1]) < 39
    world.check_all_free()


def test_a_shared_system_prompt_survives_a_pool_too_small_for_all() -> None:
    world = make(num_kv_slots=150, max_model_len=100)
    system = list(range(5000, 5040))
    world.add(request(0, [*system, 1], 1))
    world.run()
    for id in range(1, 30):
        assert ask(world, id, system + [100 * id + n for n in range(20)], max_tokens=10) >= 40
    world.check_all_free()


def test_shared_prefixes_count_once_in_the_gauges() -> None:
    world = make(max_num_batched_tokens=100)
    for id in range(5):
        world.add(request(id, PROMPT, 3))
    world.plan()
    assert world.scheduler.load_report().kv_slots_used == 44
    world.run()
    report = world.scheduler.load_report()
    assert report.kv_slots_used == 0
    assert report.kv_slots_cached == 42, "the prompt, and the same answer five times"


# -------------------------------------------------------------------- preemption


def long_answers(world: World, number: int, prompt: int, output: int) -> None:
    """Requests of which the history does not know that they answer at such length."""
    for _ in range(200):
        world.scheduler._history.add(2)
    for id in range(number):
        world.add(request(id, prompt, output))


def test_preemption_when_the_pool_is_exhausted_costs_nothing_but_time() -> None:
    world = make(num_kv_slots=120, max_model_len=100)
    long_answers(world, number=6, prompt=10, output=60)
    world.run()
    report = world.scheduler.load_report()
    assert report.preemptions > 0
    assert all(seen.tokens == [100 + n for n in range(60)] for seen in world.seen.values())
    assert report.generation_tokens == 6 * 60
    assert report.prompt_tokens == 6 * 10
    world.check_all_free()


def test_the_oldest_is_never_preempted_for_memory() -> None:
    world = make(num_kv_slots=120, max_model_len=100)
    long_answers(world, number=6, prompt=10, output=60)
    while world.seen[0].final is None:
        while world.plan() is not None:
            pass
        assert 0 in world.scheduler._batch.running
        world.result()
    assert world.scheduler.load_report().preemptions > 0


def test_a_preempted_request_finds_its_tokens_while_there_is_room() -> None:
    world = make(num_kv_slots=100, max_model_len=100)
    long_answers(world, number=2, prompt=10, output=60)
    world.run()
    report = world.scheduler.load_report()
    assert report.preemptions > 0
    # Request 1 kept at least what fits beside the 69 slots of request 0 at its end.
    assert report.repeated_tokens <= 10 + 60 - (100 - 69) + 1
    assert computed(world) == 2 * (10 + 59) + report.repeated_tokens


def test_a_stop_token_may_arrive_during_the_preemption() -> None:
    world = make(num_kv_slots=40, max_model_len=40)
    for _ in range(200):
        world.scheduler._history.add(2)
    world.add(request(0, 10, 20))
    world.add(request(1, 10, 20), script=[7] * 10 + [STOP_TOKEN])
    world.run()
    assert world.seen[1].tokens == [7] * 10
    world.check_all_free()


@pytest.mark.parametrize("leave", ["abort", "stop"])
def test_a_preempted_request_may_be_left(leave: str) -> None:
    world = make(num_kv_slots=60, max_model_len=60)
    long_answers(world, number=2, prompt=10, output=40)
    while not world.scheduler.load_report().preemptions:
        world.plan()
        world.result()
    assert world.scheduler.load_report().num_waiting == 1
    if leave == "abort":
        world.abort(1)
    else:
        world.stop_hit(1, 5)
    assert world.scheduler.load_report().num_waiting == 0
    world.run()
    world.check_all_free()


def test_prompt_logprobs_come_once_though_the_prompt_is_computed_twice() -> None:
    world = make(num_kv_slots=60, max_model_len=60, reuse_prefixes=False, max_num_batched_tokens=8)
    for _ in range(200):
        world.scheduler._history.add(2)
    world.add(request(0, 10, 45))
    for _ in range(6):
        world.plan()
        world.result()
    world.add(request(1, 30, 10, prompt_logprobs=0))
    world.run()
    assert world.scheduler.load_report().preemptions > 0
    assert world.seen[1].prompt_logprobs == list(range(1, 30))
    world.check_all_free()


def test_predicted_lengths_let_more_run_than_reservation_would() -> None:
    """Each may take all of the pool, but answers have been short lately."""
    world = make(num_kv_slots=400, max_model_len=400, max_num_seqs=16, max_num_batched_tokens=256)
    for _ in range(200):
        world.scheduler._history.add(10)
    for id in range(16):
        world.add(request(id, 10, 390), script=[7] * 9 + [STOP_TOKEN])
    world.plan()
    assert world.scheduler.load_report().num_running >= 15
    world.run()
    assert world.scheduler.load_report().preemptions == 0
    world.check_all_free()

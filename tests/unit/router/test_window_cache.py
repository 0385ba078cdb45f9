"""Prefix reuse where windowed layers have a KV pool of their own: as much as with one pool where there is room, and
little less where there is not. The worker of `router_world` asserts that every row finds its window."""

from __future__ import annotations

import random
from functools import cache

import pytest

from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.snapshot_points import window_spacing
from moeserve.router.core.memory.window_memory import least_slots
from tests.support.nightly import nightly_after
from tests.support.router.conversations import (
    WAYS_TO_TALK,
    Conversation,
    ask,
    ask_beside_a_sharer,
    ask_together,
    computed,
    edit_a_long_prompt,
    talk,
    text,
)
from tests.support.router.router_world import World, request

WINDOW, SEQS, STEP = 128, 8, 512
LEAST = least_slots(WINDOW, SEQS, STEP)


def make(num_window_slots: int = 50_000, **limits: object) -> World:
    defaults = {
        "num_kv_slots": 50_000,
        "max_num_seqs": SEQS,
        "max_model_len": 50_000,
        "max_num_batched_tokens": STEP,
        "max_num_queued_reqs": 100,
        "num_window_slots": num_window_slots,
        "window": WINDOW if num_window_slots else 0,
        "snapshot_spacing": window_spacing(WINDOW),
    }
    return World(Limits(**(defaults | limits)))  # type: ignore[arg-type]


# -------------------------------------------------------------------- conversations


@cache
def share_of_one_pool(drops_reasoning: bool, together: bool) -> float:
    return talk(make(0), drops_reasoning=drops_reasoning, together=together)


@WAYS_TO_TALK
@pytest.mark.parametrize(
    ("num_window_slots", "less"),
    nightly_after(1, [(LEAST + 8 * 3 * WINDOW, 0.06), (50_000, 0.0), (LEAST, 0.7)]),
)
def test_eight_conversations_of_ten_turns(
    drops_reasoning: bool, together: bool, num_window_slots: int, less: float
) -> None:
    """`less`: of the prompts' tokens, what one pool reuses beyond it. Of 20,000 tokens, three windows of each
    conversation are nearly all that counts; what running requests leave is better than nothing."""
    world = make(num_window_slots)
    share = talk(world, drops_reasoning=drops_reasoning, together=together)
    assert share >= share_of_one_pool(drops_reasoning, together) - less
    assert (world.scheduler.load_report().window_evictions > 0) == (less > 0)


def test_a_turn_computes_what_is_new() -> None:
    """Also where the thoughts before are left out: nothing is cut, and the prompt's end is not lost."""
    for drops_reasoning in (False, True):
        world = make(LEAST + 6 * WINDOW)
        talked = Conversation(random.Random(2), [], drops_reasoning=drops_reasoning)
        for turn in range(5):
            prompt, answer = len(talked.prompt), len(talked.answer)
            talked.ask(question=100)
            kept = prompt - 2 if drops_reasoning else prompt + answer + 1
            assert ask(world, turn, talked.prompt, talked.answer) == (kept if turn else 0)
            talked.answered()


def test_an_edit_of_a_long_prompt_computes_the_edited_part() -> None:
    """With room for all of it; and at most four windows more with room for a quarter of it."""
    for num_window_slots, more in ((50_000, 0), (LEAST + 6000, 4 * WINDOW)):
        for edited, computed_tokens in edit_a_long_prompt(make(num_window_slots)):
            assert edited <= computed_tokens <= edited + more


# -------------------------------------------------------------------- shared prompts


def test_a_shared_system_prompt() -> None:
    """Requests follow each other. A window segment is kept where two of them differ, once the second has come there."""
    world = make(LEAST + 3000)
    rng = random.Random(5)
    system = text(rng, 3000)
    hits = []
    for id in range(16):
        hits.append(ask(world, id, system + text(rng, 30), [7, 8]))
        ask(world, 100 + id, text(rng, 2000), [7])  # others want slots
    assert hits[0] == 0
    assert hits[1] >= 3000 - 4 * WINDOW
    assert hits[2:] == [3000] * 14


@pytest.mark.parametrize("length", [3000, 300])
def test_a_shared_system_prompt_of_requests_that_come_together(length: int) -> None:
    """They share it while it is computed, in the same step, too."""
    world = make(max_num_seqs=16)
    assert ask_together(world, length) == [0] + [length] * 15
    assert computed(world) == length + 16 * (30 + 2)


def test_what_a_request_computes_again_beside_its_sharer_is_correct_and_kept() -> None:
    """The first still runs and holds the slots of its prompt: the second cannot exchange its own for them."""
    _, found = ask_beside_a_sharer(make(least_slots(WINDOW, 2, STEP), max_num_seqs=2), 700)
    assert found >= 800


# -------------------------------------------------------------------- memory


def test_a_long_answer_holds_its_window() -> None:
    world = make(LEAST, num_kv_slots=1000, max_model_len=1000)
    world.add(request(0, 40, 600))
    most = 0
    while world.seen[0].final is None:
        world.plan()
        world.result()
        world.check(slots=len(world.seen[0].tokens) % 16 == 0)
        most = max(most, world.scheduler.load_report().window_slots_used)
    assert most <= WINDOW + 1
    assert len(world.seen[0].tokens) == 600


def test_a_preempted_request_goes_on_from_its_window() -> None:
    world = make(least_slots(WINDOW, 8, 512) + 400, num_kv_slots=1100, max_model_len=450)
    for _ in range(200):
        world.scheduler._history.add(2)
    for id in range(3):
        world.add(request(id, text(random.Random(id), 300), 100))
    world.run()
    report = world.scheduler.load_report()
    assert report.preemptions > 0
    assert report.window_hits >= report.preemptions
    assert report.repeated_tokens < 100 * report.preemptions
    assert all(world.seen[id].tokens == list(range(100, 200)) for id in range(3))


def test_a_lost_worker_takes_all_windows_along() -> None:
    world = make()
    for id in range(3):
        world.add(request(id, [*text(random.Random(1), 200), id], 50))
    for _ in range(5):
        world.plan()
        world.result()
    world.lose_worker()
    world.check()
    report = world.scheduler.load_report()
    assert report.window_slots_used == report.window_slots_cached == 0
    world.find_worker()
    world.run()
    world.check_all_free()

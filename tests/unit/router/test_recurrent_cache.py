"""Prefix reuse of models with recurrent state: what is computed again, and what a snapshot saves. The worker of
`router_world` asserts that every row continues from the state of exactly the tokens before it."""

from __future__ import annotations

import random

import pytest

from moeserve.messages.schema import DetokenizeEnd, RequestError
from moeserve.router.core.limits import Limits
from tests.support.router.conversations import (
    END_OF_TURN,
    WAYS_TO_TALK,
    Conversation,
    ask,
    ask_beside_a_sharer,
    ask_together,
    cached,
    computed,
    edit_a_long_prompt,
    talk,
    text,
)
from tests.support.router.router_world import World, request, rows_of


def make(**limits: object) -> World:
    defaults = {
        "num_kv_slots": 50_000,
        "max_num_seqs": 8,
        "max_model_len": 50_000,
        "max_num_batched_tokens": 512,
        "max_num_queued_reqs": 100,
        "num_state_slots": 32,
    }
    return World(Limits(**(defaults | limits)))  # type: ignore[arg-type]


# -------------------------------------------------------------------- conversations


@WAYS_TO_TALK
@pytest.mark.parametrize(
    ("num_state_slots", "least"),
    [
        (64, 0.95),
        pytest.param(33, 0.93, marks=pytest.mark.slow),  # between the others, which stay
        (20, 0.8),
    ],
)
def test_eight_conversations_of_ten_turns(
    drops_reasoning: bool, together: bool, num_state_slots: int, least: float
) -> None:
    """Without a limit 97.5% are possible, or 95.1% where each turn renders the answer before again. With fewer
    snapshots it gets less, but not nothing: LRU, which evicts in a circle what is asked for in a circle, would find
    nothing with 20 slots for requests that follow each other."""
    world = make(num_state_slots=num_state_slots)
    reused = talk(world, drops_reasoning=drops_reasoning, together=together)
    assert reused >= least
    if num_state_slots == 20:
        assert world.scheduler.load_report().state_snapshot_evictions > 100


def test_a_turn_computes_what_is_new_and_a_few_tokens() -> None:
    world = make()
    talked = Conversation(random.Random(2), [])
    for turn in range(5):
        before = len(talked.prompt) + len(talked.answer)
        talked.ask(question=100)
        hit = ask(world, turn, talked.prompt, talked.answer)
        # All the prompt before and its answer, with the token that ended the turn: what the request has computed.
        assert hit == (before + 1 if turn else 0)
        talked.answered()


def test_a_turn_after_dropped_thoughts_computes_the_answer_before_again() -> None:
    world = make()
    talked = Conversation(random.Random(2), [], drops_reasoning=True)
    for turn in range(5):
        before = len(talked.prompt)
        talked.ask(question=100)
        assert ask(world, turn, talked.prompt, talked.answer) == (before - 8 if turn else 0)
        talked.answered()


def test_short_turns_after_dropped_thoughts() -> None:
    """Each turn continues from the prompt before, however few tokens a turn has. With few slots the snapshots between
    are given up, not those of the other conversations."""
    for num_state_slots in (32, 10):
        world = make(num_state_slots=num_state_slots)
        rng = random.Random(2)
        talks = [Conversation(rng, text(rng, 200), drops_reasoning=True) for _ in range(2)]
        for turn in range(12):
            for number, talked in enumerate(talks):
                before = len(talked.prompt) - 8
                talked.ask(question=14, content=10)
                hit = ask(world, 2 * turn + number, talked.prompt, talked.answer)
                assert hit == (before if turn else 0)
                talked.answered()


@pytest.mark.parametrize("drops_reasoning", [False, True])
def test_an_edited_last_message(drops_reasoning: bool) -> None:
    world = make()
    rng = random.Random(3)
    talked = Conversation(rng, text(rng, 1000), drops_reasoning=drops_reasoning)
    for turn in range(3):
        talked.ask(question=100, content=100)
        ask(world, turn, talked.prompt, talked.answer)
        talked.answered()
    shared = len(talked.history) + 3  # up to the text of the message
    talked.ask(question=100)
    ask(world, 3, talked.prompt, talked.answer)
    for edit in range(4, 8):
        talked.ask(question=100)
        hit = ask(world, edit, talked.prompt, talked.answer)
        if edit == 4:  # continues from the turn before
            assert hit == shared - (6 + 100 + 5 if drops_reasoning else 4)
        else:  # the first edit has left a snapshot where it departs, if that saves enough
            assert hit == shared - (0 if drops_reasoning else 4)


def test_the_first_edit_of_a_long_prompt_computes_at_most_twice_the_edited_part() -> None:
    for edited, computed_tokens in edit_a_long_prompt(make()):
        assert computed_tokens <= 2 * edited + 512


# -------------------------------------------------------------------- shared prompts


def test_a_shared_system_prompt_of_requests_that_follow_each_other() -> None:
    world = make()
    rng = random.Random(5)
    system = text(rng, 3000)
    hits = [ask(world, id, system + text(rng, 30), [7, 8]) for id in range(16)]
    assert hits[0] == 0
    assert hits[1] >= 2000  # from a snapshot point of the first
    assert hits[2:] == [3000] * 14


@pytest.mark.parametrize("length", [3000, 300])
def test_a_shared_system_prompt_of_requests_that_come_together(length: int) -> None:
    """Those that come while the first is computed ask it for a snapshot where they depart, and wait."""
    world = make(max_num_seqs=16)
    found = ask_together(world, length)
    # A prompt that one step holds has passed the place before anyone could ask: the second computes it, too.
    assert computed(world) <= (2 if length < 512 else 1) * length + 16 * (30 + 3)
    assert found[2:] == [length] * 14


def test_what_a_request_computes_again_beside_its_sharer_is_correct_and_kept() -> None:
    """The first still runs and holds the slots of its prompt: the second cannot exchange its own for them."""
    world = make()
    system, found = ask_beside_a_sharer(world, 600)
    assert cached(world, 1) == 110  # a snapshot point of the first
    assert found >= 700
    assert ask(world, 3, system + text(random.Random(8), 100), [7]) == 600


def test_choices_of_one_prompt_are_cut_at_the_same_border() -> None:
    world = make()
    prompt = text(random.Random(8), 1000)
    for id in range(4):
        world.add(request(id, prompt, 3))
    world.run()
    assert [cached(world, id) for id in range(4)] == [0, 992, 992, 992]


def test_a_short_prompt_is_not_cut() -> None:
    world = make()
    world.add(request(0, 71, 3))
    assert rows_of(world.plan()) == [(0, 71, True)]
    world = make()
    world.add(request(0, 72, 3))
    assert rows_of(world.plan()) == [(0, 64, False)]
    assert rows_of(world.plan()) == [(64, 8, True)]


# -------------------------------------------------------------------- endings and preemption


def test_a_preempted_request_goes_on_from_its_state() -> None:
    world = make(num_kv_slots=1100, max_model_len=450)
    for _ in range(200):
        world.scheduler._history.add(2)
    for id in range(3):
        world.add(request(id, text(random.Random(id), 300), 100))
    world.run()
    report = world.scheduler.load_report()
    assert report.preemptions == 1
    # The answers that go on evict KV from its end, and with it the state there; that near the prompt's end stays.
    assert 0 < report.repeated_tokens <= 8 + 70
    assert report.state_snapshot_hits == 1
    assert all(seen.tokens == [100 + n for n in range(100)] for seen in world.seen.values())
    world.check_all_free()


def test_preemption_for_fairness_computes_nothing_again() -> None:
    world = make(max_num_seqs=2, num_state_slots=6)
    rng = random.Random(9)
    for id in range(2):
        world.add(request(id, text(rng, 100), 300, key_name="much"))
    for _ in range(10):
        world.plan()
        world.result()
    world.add(request(2, text(rng, 100), 5, key_name="little"))
    world.run()
    report = world.scheduler.load_report()
    assert report.preemptions == 1
    assert report.repeated_tokens == 0
    world.check_all_free()


def test_a_stop_string_leaves_no_state_of_unknown_tokens() -> None:
    """When the hit arrives, a row is planned that consumes a token which the router does not know."""
    world = make()
    prompt = text(random.Random(10), 100)
    world.add(request(0, prompt, 100))
    for _ in range(8):
        world.plan()
        world.result()
    world.plan()
    world.plan()
    world.stop_hit(0, 3)
    world.run()
    world.check_all_free()
    assert ask(world, 1, [*prompt, 100, 101, *text(random.Random(11), 50)], [7]) == 92


def test_an_abort_leaves_the_state_of_what_is_computed() -> None:
    world = make()
    prompt = text(random.Random(12), 3000)
    world.add(request(0, prompt, 50))
    world.plan()
    world.plan()
    world.abort(0)
    assert isinstance(world.seen[0].final, DetokenizeEnd)
    world.run()
    assert ask(world, 1, prompt, [7]) >= 900


def test_what_gave_non_finite_logits_leaves_no_state() -> None:
    world = make()
    prompt = text(random.Random(13), 500)
    world.add(request(0, prompt, 5), script=[7, -1])
    world.run()
    assert isinstance(world.seen[0].final, RequestError)
    assert world.scheduler.load_report().state_slots_snapshots == 0
    assert ask(world, 1, prompt, [7]) == 0


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    world = make(reuse_prefixes=False)
    prompt = text(random.Random(14), 500)
    assert ask(world, 0, prompt, [7]) == 0
    assert ask(world, 1, prompt, [7]) == 0
    assert world.scheduler.load_report().state_slots_snapshots == 0
    assert world.worker.copies == 0


def test_as_many_requests_run_as_have_a_state() -> None:
    world = make(num_state_slots=3)
    for id in range(6):
        world.add(request(id, 100, 20))
    world.plan()
    report = world.scheduler.load_report()
    assert (report.num_running, report.state_slots_running) == (3, 3)
    world.run()
    world.check_all_free()


def test_the_only_snapshot_becomes_the_state_of_who_continues_it() -> None:
    world = make(num_state_slots=1)
    prompt = text(random.Random(15), 300)
    ask(world, 0, prompt, [7, 8])
    assert ask(world, 1, [*prompt, 7, 8, END_OF_TURN, *text(random.Random(16), 10)], [7]) == 303
    assert world.worker.copies == 0


def test_the_gauges_count_every_slot() -> None:
    world = make()
    prompt = text(random.Random(17), 500)
    ask(world, 0, prompt, [7, 8])
    world.add(request(1, [*prompt, 9], 5))
    world.plan()
    report = world.scheduler.load_report()
    assert (report.state_slots_total, report.state_slots_running) == (32, 1)
    assert report.state_slots_snapshots >= 2
    assert report.state_snapshot_hits == 1
    world.run()


def test_cached_prefixes_that_are_evicted_take_their_snapshots_along() -> None:
    world = make(num_kv_slots=1200, max_model_len=600)
    for id in range(12):
        ask(world, id, text(random.Random(id), 500), [7])
    report = world.scheduler.load_report()
    assert report.state_slots_snapshots <= 3 * 3
    assert report.state_snapshot_evictions == 0, "there are slots enough"

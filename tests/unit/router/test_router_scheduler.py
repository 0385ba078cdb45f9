"""What the scheduler promises, one promise a test; `test_router_property` mixes them all."""

from __future__ import annotations

import pytest

from tests.support.router.checking_worker import STOP_TOKEN
from tests.support.router.router_world import final_error, final_item, make_world, request, rows_of

# -------------------------------------------------------------------- batching


def test_the_next_plan_is_made_while_the_first_runs() -> None:
    world = make_world()
    world.add(request(0, prompt=5, max_tokens=10))
    assert rows_of(world.plan()) == [(0, 5, True)]
    assert rows_of(world.plan()) == [(5, 1, True)]
    assert world.plan() is None, "two plans in flight are the most"
    world.result()
    assert rows_of(world.plan()) == [(6, 1, True)]


def test_decode_rows_go_first_and_prompts_share_the_rest() -> None:
    world = make_world(max_num_batched_tokens=10)
    world.add(request(0, prompt=4, max_tokens=50))
    world.plan()
    world.add(request(1, prompt=5, max_tokens=5))
    world.add(request(2, prompt=20, max_tokens=5))
    assert rows_of(world.plan()) == [(4, 1, True), (0, 5, True), (0, 4, False)]
    world.result()
    assert rows_of(world.plan()) == [(5, 1, True), (5, 1, True), (4, 8, False)]
    world.result()
    assert rows_of(world.plan()) == [(6, 1, True), (6, 1, True), (12, 8, True)]
    world.run()
    assert [len(world.seen[id].tokens) for id in range(3)] == [50, 5, 5]


def test_no_more_requests_run_than_request_slots_or_tokens_in_a_step() -> None:
    for limits in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 2}):
        world = make_world(**limits)  # type: ignore[arg-type]
        for id in range(4):
            world.add(request(id, prompt=1, max_tokens=5))
        world.plan()
        report = world.scheduler.load_report()
        assert (report.num_running, report.num_waiting) == (2, 2)
        world.run()
        world.check_all_free()


def test_nobody_is_bound_before_there_are_tokens_for_its_prompt() -> None:
    world = make_world(max_num_batched_tokens=10)
    world.add(request(0, prompt=25, max_tokens=1))
    world.add(request(1, prompt=26, max_tokens=1))
    for running in (1, 1, 2):
        world.plan()
        assert world.scheduler.load_report().num_running == running
        world.result()


def test_a_request_at_its_length_is_not_planned_again() -> None:
    world = make_world()
    world.add(request(0, prompt=3, max_tokens=2))
    assert rows_of(world.plan()) == [(0, 3, True)]
    assert rows_of(world.plan()) == [(3, 1, True)]
    world.result()
    assert world.plan() is None
    world.result()
    assert final_item(world, 0).finish_reason == "length"
    assert world.seen[0].tokens == [100, 101]
    world.check_all_free()


def test_a_stop_token_costs_one_row_and_its_slots_are_free_at_once() -> None:
    world = make_world()
    world.add(request(0, prompt=3, max_tokens=50), script=[7, STOP_TOKEN])
    world.plan()
    world.plan()
    world.result()
    world.plan()  # sent before the stop token is known: the wasted row
    world.result()
    assert len(world.in_flight) == 1
    assert world.scheduler.load_report().kv_slots_used == 0
    final = final_item(world, 0)
    assert (final.finish_reason, final.stop_token, final.token_ids) == ("stop", STOP_TOKEN, [])
    assert world.seen[0].tokens == [7]
    assert final.usage is not None
    assert final.usage.completion_tokens == 2
    assert world.plan() is None
    world.result()
    assert world.scheduler.load_report().generation_tokens == 2
    world.check_all_free()


def test_slots_of_a_stale_row_may_be_given_out_while_it_is_in_flight() -> None:
    # The worker of this world asserts that no position it reads was overwritten.
    world = make_world(num_kv_slots=12, max_model_len=12)
    world.add(request(0, prompt=5, max_tokens=6), script=[7, STOP_TOKEN])
    world.add(request(1, prompt=8, max_tokens=4))
    world.plan()
    world.plan()
    world.result()
    world.plan()
    world.result()
    assert rows_of(world.plan()) == [(0, 8, True)], "request 1 takes the slots at once"
    world.run()
    assert len(world.seen[1].tokens) == 4
    world.check_all_free()


# -------------------------------------------------------------------- order


def test_priority_then_arrival() -> None:
    world = make_world(max_num_seqs=1)
    for id, (priority, arrival) in enumerate([(1, 0.0), (0, 2.0), (0, 1.0), (-1, 9.0)]):
        world.add(request(id, prompt=2, max_tokens=1, priority=priority, arrival=arrival))
    order = []
    while (plan := world.plan()) is not None:
        order.append(plan.new_seqs[0].sampling.seed)
        world.result()
    assert order == [3, 2, 1, 0]


def test_an_urgent_request_does_not_wait_for_a_long_prompt() -> None:
    world = make_world(max_num_batched_tokens=10)
    world.add(request(0, prompt=100, max_tokens=1, priority=1))
    world.plan()
    world.add(request(1, prompt=4, max_tokens=1, priority=0))
    assert rows_of(world.plan()) == [(0, 4, True), (10, 6, False)]


def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    world = make_world(num_kv_slots=40, max_model_len=40)
    world.add(request(0, prompt=20, max_tokens=10))
    world.plan()
    world.add(request(1, prompt=30, max_tokens=5))
    for id in range(2, 40):
        world.add(request(id, prompt=2, max_tokens=2))
        world.plan()
        world.result()
    assert len(world.seen[1].tokens) == 5, (
        "it does not fit beside 0; once it was passed, nobody more passes it"
    )
    world.run()
    assert all(len(seen.tokens) > 0 for seen in world.seen.values())
    world.check_all_free()


# -------------------------------------------------------------------- the pool


def test_a_full_pool_means_waiting() -> None:
    world = make_world(num_kv_slots=64, max_model_len=64)
    for id in range(12):
        world.add(request(id, prompt=10, max_tokens=20))
    most = 0
    while not world.scheduler.is_idle:
        while world.plan() is not None:
            pass
        most = max(most, world.scheduler.load_report().kv_slots_used)
        world.result()
        world.check()
    assert 40 < most <= 64
    assert all(len(seen.tokens) == 20 for seen in world.seen.values())


def test_requests_of_unlike_lengths_share_a_pool_that_their_sum_would_overfill() -> None:
    world = make_world(num_kv_slots=60, max_model_len=60)
    world.add(request(0, prompt=20, max_tokens=4))  # at most 23 slots, for 3 steps
    world.add(request(1, prompt=20, max_tokens=21))  # at most 40, when the other is long gone
    world.plan()
    assert world.scheduler.load_report().num_running == 2
    world.run()
    world.check_all_free()


def test_a_prompt_under_way_counts_as_whole() -> None:
    world = make_world(num_kv_slots=50, max_model_len=50, max_num_batched_tokens=30)
    world.add(request(0, prompt=40, max_tokens=1))
    world.plan()
    world.add(request(1, prompt=15, max_tokens=2))
    assert rows_of(world.plan()) == [(30, 10, True)], "40 + 15 slots are more than there are"


# -------------------------------------------------------------------- refusals


def test_what_can_never_fit_is_refused_at_once() -> None:
    world = make_world(num_kv_slots=50, max_model_len=40)
    world.add(request(0, prompt=30, max_tokens=11))
    assert final_error(world, 0).status == 400
    assert "max_model_len" in final_error(world, 0).message
    world = make_world(num_kv_slots=30, max_model_len=40)
    world.add(request(0, prompt=25, max_tokens=6))
    assert final_error(world, 0).status == 400
    assert "KV pool" in final_error(world, 0).message
    world.add(request(1, prompt=25, max_tokens=5))
    world.run()
    assert len(world.seen[1].tokens) == 5


def test_an_empty_prompt_is_refused() -> None:
    world = make_world()
    message = request(0, prompt=1, max_tokens=1)
    world.add(type(message)(0, b"", message.sampling, message.text, 0.0))
    assert final_error(world, 0).status == 400


def test_too_many_waiting_requests_get_a_503() -> None:
    world = make_world(max_num_queued_reqs=3)
    for id in range(4):
        world.add(request(id, prompt=2, max_tokens=2))
    assert final_error(world, 3).status == 503
    assert not world.seen[3].opened
    world.run()
    assert all(len(world.seen[id].tokens) == 2 for id in range(3))


def test_an_id_in_use_is_a_bug_and_loud() -> None:
    scheduler = make_world().scheduler
    scheduler.add(request(0, prompt=2, max_tokens=2))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request(0, prompt=2, max_tokens=2))

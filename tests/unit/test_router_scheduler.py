"""What the scheduler promises, one promise a test; `test_router_property` mixes them all."""

from __future__ import annotations

import time

import pytest

from moeserve.messages.schema import (
    CloseText,
    RequestError,
    Sampled,
    StepPlan,
    StepResult,
    TokenLogprob,
    TokensItem,
    TokensOut,
)
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import ProtocolError, Scheduler
from tests.unit.router_world import STOP_TOKEN, World, request


def make(
    num_kv_slots: int = 1000,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_num_queued_reqs: int = 100,
    max_model_len: int = 500,
) -> World:
    return World(
        Limits(num_kv_slots, max_num_seqs, max_model_len, max_num_batched_tokens, max_num_queued_reqs)
    )


def shape(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """(start, count, sample) of each row."""
    assert plan is not None
    return [(row.start, row.count, row.sample) for row in plan.rows]


def final_item(world: World, id: int) -> TokensItem:
    final = world.seen[id].final
    assert isinstance(final, TokensItem)
    return final


def final_error(world: World, id: int) -> RequestError:
    final = world.seen[id].final
    assert isinstance(final, RequestError)
    return final


# -------------------------------------------------------------------- batching


def test_the_next_plan_is_made_while_the_first_runs() -> None:
    world = make()
    world.add(request(0, prompt=5, max_tokens=10))
    assert shape(world.plan()) == [(0, 5, True)]
    assert shape(world.plan()) == [(5, 1, True)]
    assert world.plan() is None, "two plans in flight are the most"
    world.result()
    assert shape(world.plan()) == [(6, 1, True)]


def test_decode_rows_go_first_and_prompts_share_the_rest() -> None:
    world = make(max_num_batched_tokens=10)
    world.add(request(0, prompt=4, max_tokens=50))
    world.plan()
    world.add(request(1, prompt=5, max_tokens=5))
    world.add(request(2, prompt=20, max_tokens=5))
    assert shape(world.plan()) == [(4, 1, True), (0, 5, True), (0, 4, False)]
    world.result()
    assert shape(world.plan()) == [(5, 1, True), (5, 1, True), (4, 8, False)]
    world.result()
    assert shape(world.plan()) == [(6, 1, True), (6, 1, True), (12, 8, True)]
    world.run()
    assert [len(world.seen[id].tokens) for id in range(3)] == [50, 5, 5]


def test_no_more_requests_run_than_request_slots_or_tokens_in_a_step() -> None:
    for limits in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 2}):
        world = make(**limits)
        for id in range(4):
            world.add(request(id, prompt=1, max_tokens=5))
        world.plan()
        report = world.scheduler.load_report()
        assert (report.num_running, report.num_waiting) == (2, 2)
        world.run()
        world.check_all_free()


def test_nobody_is_bound_before_there_are_tokens_for_its_prompt() -> None:
    world = make(max_num_batched_tokens=10)
    world.add(request(0, prompt=25, max_tokens=1))
    world.add(request(1, prompt=26, max_tokens=1))
    for running in (1, 1, 2):
        world.plan()
        assert world.scheduler.load_report().num_running == running
        world.result()


def test_a_request_at_its_length_is_not_planned_again() -> None:
    world = make()
    world.add(request(0, prompt=3, max_tokens=2))
    assert shape(world.plan()) == [(0, 3, True)]
    assert shape(world.plan()) == [(3, 1, True)]
    world.result()
    assert world.plan() is None
    world.result()
    assert final_item(world, 0).finish_reason == "length"
    assert world.seen[0].tokens == [100, 101]
    world.check_all_free()


def test_a_stop_token_costs_one_row_and_its_slots_are_free_at_once() -> None:
    world = make()
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
    world = make(num_kv_slots=12, max_model_len=12)
    world.add(request(0, prompt=5, max_tokens=6), script=[7, STOP_TOKEN])
    world.add(request(1, prompt=8, max_tokens=4))
    world.plan()
    world.plan()
    world.result()
    world.plan()
    world.result()
    assert shape(world.plan()) == [(0, 8, True)], "request 1 takes the slots at once"
    world.run()
    assert len(world.seen[1].tokens) == 4
    world.check_all_free()


# -------------------------------------------------------------------- order


def test_priority_then_arrival() -> None:
    world = make(max_num_seqs=1)
    for id, (priority, arrival) in enumerate([(1, 0.0), (0, 2.0), (0, 1.0), (-1, 9.0)]):
        world.add(request(id, prompt=2, max_tokens=1, priority=priority, arrival=arrival))
    order = []
    while (plan := world.plan()) is not None:
        order.append(plan.new_seqs[0].sampling.seed)
        world.result()
    assert order == [3, 2, 1, 0]


def test_an_urgent_request_does_not_wait_for_a_long_prompt() -> None:
    world = make(max_num_batched_tokens=10)
    world.add(request(0, prompt=100, max_tokens=1, priority=1))
    world.plan()
    world.add(request(1, prompt=4, max_tokens=1, priority=0))
    assert shape(world.plan()) == [(0, 4, True), (10, 6, False)]


def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    world = make(num_kv_slots=40, max_model_len=40)
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
    world = make(num_kv_slots=64, max_model_len=64)
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
    world = make(num_kv_slots=60, max_model_len=60)
    world.add(request(0, prompt=20, max_tokens=4))  # at most 23 slots, for 3 steps
    world.add(request(1, prompt=20, max_tokens=21))  # at most 40, when the other is long gone
    world.plan()
    assert world.scheduler.load_report().num_running == 2
    world.run()
    world.check_all_free()


def test_a_prompt_under_way_counts_as_whole() -> None:
    world = make(num_kv_slots=50, max_model_len=50, max_num_batched_tokens=30)
    world.add(request(0, prompt=40, max_tokens=1))
    world.plan()
    world.add(request(1, prompt=15, max_tokens=2))
    assert shape(world.plan()) == [(30, 10, True)], "40 + 15 slots are more than there are"


# -------------------------------------------------------------------- refusals


def test_what_can_never_fit_is_refused_at_once() -> None:
    world = make(num_kv_slots=50, max_model_len=40)
    world.add(request(0, prompt=30, max_tokens=11))
    assert final_error(world, 0).status == 400
    assert "max_model_len" in final_error(world, 0).message
    world = make(num_kv_slots=30, max_model_len=40)
    world.add(request(0, prompt=25, max_tokens=6))
    assert final_error(world, 0).status == 400
    assert "KV pool" in final_error(world, 0).message
    world.add(request(1, prompt=25, max_tokens=5))
    world.run()
    assert len(world.seen[1].tokens) == 5


def test_an_empty_prompt_is_refused() -> None:
    world = make()
    message = request(0, prompt=1, max_tokens=1)
    world.add(type(message)(0, b"", message.sampling, message.text, 0.0))
    assert final_error(world, 0).status == 400


def test_too_many_waiting_requests_get_a_503() -> None:
    world = make(max_num_queued_reqs=3)
    for id in range(4):
        world.add(request(id, prompt=2, max_tokens=2))
    assert final_error(world, 3).status == 503
    assert not world.seen[3].opened
    world.run()
    assert all(len(world.seen[id].tokens) == 2 for id in range(3))


def test_an_id_in_use_is_a_bug_and_loud() -> None:
    scheduler = make().scheduler
    scheduler.add(request(0, prompt=2, max_tokens=2))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(request(0, prompt=2, max_tokens=2))


# -------------------------------------------------------------------- endings


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_frees_everything_at_once(steps: int) -> None:
    """Waiting, in prefill, and in decode; the rows in flight do no harm."""
    world = make(max_num_batched_tokens=4)
    world.add(request(0, prompt=7, max_tokens=50))
    for _ in range(steps):
        world.plan()
        world.result()
    world.plan()
    world.plan()
    world.abort(0)
    assert world.scheduler.load_report().kv_slots_used == 0
    assert isinstance(world.seen[0].final, CloseText)
    world.abort(0)
    world.abort(12345)
    world.stop_hit(0, 1)
    world.run()
    world.check_all_free()
    assert world.scheduler.load_report().aborts == 1


def test_stop_hit_ends_the_request_with_the_clients_count() -> None:
    world = make()
    world.add(request(0, prompt=3, max_tokens=50))
    for _ in range(5):
        world.plan()
        world.result()
    world.stop_hit(0, num_tokens=3)
    final = final_item(world, 0)
    assert final.finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == 3
    world.run()
    world.check_all_free()


def test_stop_hit_after_the_end_is_harmless() -> None:
    world = make()
    world.add(request(0, prompt=3, max_tokens=2))
    world.run()
    world.stop_hit(0, num_tokens=2)  # asserts that there is no second final message
    assert final_item(world, 0).finish_reason == "length"


def test_min_tokens_outweighs_a_stop_token() -> None:
    world = make()
    world.add(request(0, prompt=3, max_tokens=9, min_tokens=2), script=[STOP_TOKEN, STOP_TOKEN, STOP_TOKEN])
    world.run()
    assert world.seen[0].tokens == [STOP_TOKEN, STOP_TOKEN]
    assert final_item(world, 0).stop_token == STOP_TOKEN


def test_non_finite_logits_fail_that_request_only() -> None:
    world = make()
    world.add(request(0, prompt=3, max_tokens=5), script=[7, -1])
    world.add(request(1, prompt=3, max_tokens=5))
    world.run()
    error = final_error(world, 0)
    assert error.status == 500
    assert "non-finite" in error.message
    assert len(world.seen[1].tokens) == 5
    world.check_all_free()


def test_the_workers_death_ends_every_request_and_refuses_the_next() -> None:
    world = make(max_num_seqs=2)
    for id in range(4):
        world.add(request(id, prompt=3, max_tokens=5))
    world.plan()
    world.die()
    world.die()
    world.add(request(4, prompt=3, max_tokens=5))
    assert [final_error(world, id).status for id in range(5)] == [503] * 5
    assert world.plan() is None
    world.check_all_free()


def test_an_answer_to_another_step_is_not_believed() -> None:
    world = make()
    world.add(request(0, prompt=3, max_tokens=5))
    plan = world.plan()
    assert plan is not None
    with pytest.raises(ProtocolError):
        world.scheduler.step_result(StepResult(plan.step + 1, [Sampled(1)], {}, 0.0, 0.0), 0.0)
    with pytest.raises(ProtocolError):
        world.scheduler.step_result(StepResult(plan.step, [], {}, 0.0, 0.0), 0.0)


# -------------------------------------------------------------------- what the client is told


def test_scoring_a_prompt_takes_no_token_and_all_of_its_logprobs() -> None:
    world = make(max_num_batched_tokens=4)
    world.add(request(0, prompt=10, max_tokens=0, prompt_logprobs=0))
    assert shape(world.plan()) == [(0, 4, False)]
    world.result()
    assert world.seen[0].prompt_logprobs == [1, 2, 3, 4], "chunk by chunk, as they come"
    world.run()
    assert world.seen[0].prompt_logprobs == list(range(1, 10))
    final = final_item(world, 0)
    assert (final.finish_reason, world.seen[0].tokens) == ("length", [])
    assert final.usage is not None
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (10, 0)
    world.check_all_free()


def test_usage_splits_the_time_into_queue_prefill_and_decode() -> None:
    scheduler = Scheduler(Limits(100, 4, 100, 4, 10))
    scheduler.add(request(0, prompt=8, max_tokens=3, arrival=10.0))
    for planned_at, done_at in [(10.5, 11.0), (11.0, 12.5), (12.5, 13.0), (13.0, 14.0)]:
        plan = scheduler.plan(planned_at)
        assert plan is not None
        sampled = [Sampled(5) for row in plan.rows if row.sample]
        scheduler.step_result(StepResult(plan.step, sampled, {}, 0.0, 0.0), done_at)
    last = scheduler.take_messages()[-1]
    assert isinstance(last, TokensOut)
    usage = last.items[-1].usage
    assert usage is not None
    assert (usage.queue_ms, usage.prefill_ms, usage.decode_ms) == (500.0, 2000.0, 1500.0)


def test_logprobs_travel_with_their_tokens() -> None:
    scheduler = Scheduler(Limits(100, 4, 100, 16, 10))
    scheduler.add(request(0, prompt=8, max_tokens=2, logprobs=1))
    entries = [TokenLogprob(5, -0.5, 1, [5], [-0.5]), TokenLogprob(6, -0.25, 1, [6], [-0.25])]
    for entry in entries:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.step_result(StepResult(plan.step, [Sampled(entry.token_id, entry)], {}, 0.0, 0.0), now=1.0)
    items = [item for m in scheduler.take_messages() if isinstance(m, TokensOut) for item in m.items]
    assert [(item.token_ids, item.logprobs) for item in items] == [([5], [entries[0]]), ([6], [entries[1]])]


def test_a_step_makes_one_message() -> None:
    world = make()
    for id in range(8):
        world.scheduler.add(request(id, prompt=3, max_tokens=1 + id % 2))
    world.scheduler.take_messages()
    plan = world.scheduler.plan(0.0)
    assert plan is not None
    world.scheduler.step_result(world.worker.step(plan), 1.0)
    (message,) = world.scheduler.take_messages()
    assert isinstance(message, TokensOut)
    assert sorted(item.id for item in message.items) == list(range(8))


def test_totals_count_what_was_done() -> None:
    world = make(max_num_batched_tokens=6)
    world.add(request(0, prompt=10, max_tokens=4))
    world.add(request(1, prompt=2, max_tokens=4), script=[7, STOP_TOKEN])
    world.run()
    report = world.scheduler.load_report()
    assert (report.prompt_tokens, report.generation_tokens) == (12, 6)
    assert report.steps >= 5


@pytest.mark.no_cover
def test_a_step_of_256_requests_takes_far_less_than_a_millisecond() -> None:
    """Measured 0.1 ms; the bound leaves room for a busy machine and still catches anything quadratic."""
    scheduler = Scheduler(Limits(256 * 300, 256, 300, 2048, 1000))
    for id in range(256):
        scheduler.add(request(id, prompt=8, max_tokens=200))
    times = []
    for _ in range(150):
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = StepResult(plan.step, [Sampled(7) for row in plan.rows if row.sample], {}, 0.0, 0.0)
        stepped = time.perf_counter()
        scheduler.step_result(result, 0.0)
        scheduler.take_messages()
        times.append(planned - start + time.perf_counter() - stepped)
    assert sorted(times)[len(times) // 2] < 1e-3

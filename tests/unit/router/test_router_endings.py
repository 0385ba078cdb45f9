"""How requests end in the scheduler, and what their clients are told."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from moeserve.messages.reasoning import EarlyEnd, Headers
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.schema import DetokenizeEnd, TokensOut
from moeserve.messages.steps import Sampled, StepResult
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler
from moeserve.router.core.steps.plans_in_flight import ProtocolError
from tests.support.router.checking_worker import STOP_TOKEN
from tests.support.router.router_world import final_error, final_item, make_world, request, rows_of

# -------------------------------------------------------------------- endings


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_frees_everything_at_once(steps: int) -> None:
    """Waiting, in prefill, and in decode; the rows in flight do no harm."""
    world = make_world(max_num_batched_tokens=4)
    world.add(request(0, prompt=7, max_tokens=50))
    for _ in range(steps):
        world.plan()
        world.result()
    world.plan()
    world.plan()
    world.abort(0)
    assert world.scheduler.load_report().kv_slots_used == 0
    assert isinstance(world.seen[0].final, DetokenizeEnd)
    world.abort(0)
    world.abort(12345)
    world.stop_hit(0, 1)
    world.run()
    world.check_all_free()
    assert world.scheduler.load_report().aborts == 1


def test_stop_hit_ends_the_request_with_the_clients_count() -> None:
    world = make_world()
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


def test_a_turn_that_ends_in_reasoning_again_has_ended() -> None:
    """A model that begins to reason again behind each end would do so until max_tokens."""
    reasoning = Headers(
        opening=(50,), end=51, mark=(50, 52), closing=(53,), ending=(53, 50, 54, 51), is_open=True
    )
    again = [53, 50, 52, 51]
    world = make_world()
    message = replace(
        request(0, prompt=3, max_tokens=50), early_end=EarlyEnd(reasoning, frozenset({STOP_TOKEN}))
    )
    world.add(message, script=[7, STOP_TOKEN, 7, 7, 7, *again, STOP_TOKEN])
    world.run()
    assert final_item(world, 0).finish_reason == "stop"
    assert world.seen[0].tokens == [7, *reasoning.ending, *again]


def test_an_adapter_that_no_request_has_is_forgotten() -> None:
    """Whoever loads and unloads adapters all day leaves no trace of each."""
    world = make_world()
    for id, adapter in enumerate(("a", "b", "b", "", "c")):
        world.add(request(id, prompt=3, max_tokens=4 + id, adapter=adapter))
    assert world.scheduler.adapters_in_use() == ["a", "b", "c"]
    world.abort(1)
    assert world.scheduler.adapters_in_use() == ["a", "b", "c"]
    world.abort(4)
    assert world.scheduler.adapters_in_use() == ["a", "b"]
    world.run()
    assert world.scheduler.adapters_in_use() == []


def test_stop_hit_after_the_end_is_harmless() -> None:
    world = make_world()
    world.add(request(0, prompt=3, max_tokens=2))
    world.run()
    world.stop_hit(0, num_tokens=2)  # asserts that there is no second final message
    assert final_item(world, 0).finish_reason == "length"


def test_min_tokens_outweighs_a_stop_token() -> None:
    world = make_world()
    world.add(request(0, prompt=3, max_tokens=9, min_tokens=2), script=[STOP_TOKEN, STOP_TOKEN, STOP_TOKEN])
    world.run()
    assert world.seen[0].tokens == [STOP_TOKEN, STOP_TOKEN]
    assert final_item(world, 0).stop_token == STOP_TOKEN


def test_non_finite_logits_fail_that_request_only() -> None:
    world = make_world()
    world.add(request(0, prompt=3, max_tokens=5), script=[7, -1])
    world.add(request(1, prompt=3, max_tokens=5))
    world.run()
    error = final_error(world, 0)
    assert error.status == 500
    assert "non-finite" in error.message
    assert len(world.seen[1].tokens) == 5
    world.check_all_free()


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_failed_row_ends_its_request_alone(step: int) -> None:
    """Whether it is a chunk of a prompt, its last one or a decode row; a plan behind it is on its way."""
    world = make_world(max_num_batched_tokens=8)
    world.add(request(0, prompt=7, max_tokens=5, prompt_logprobs=0, progress=True))
    world.add(request(1, prompt=7, max_tokens=5))
    for _ in range(step):
        world.plan()
        world.result()
    plan = world.plan()
    world.plan()
    assert plan is not None
    row = [world.worker_id(row.req_slot, plan) for row in plan.rows].index(0)
    world.fail_row(row, "expert 3 of layer 1 could not be read from disk: Input/output error")
    world.run()
    error = final_error(world, 0)
    assert (error.status, error.message[:8]) == (500, "expert 3")
    assert len(world.seen[1].tokens) == 5
    world.check_all_free()
    # None of its KV is found again.
    world.add(request(2, prompt=[100_000, *range(1, 7)], max_tokens=1))
    world.run()
    usage = final_item(world, 2).usage
    assert usage is not None
    assert usage.cached_tokens == 0


def test_the_servers_end_ends_every_request_and_refuses_the_next() -> None:
    world = make_world(max_num_seqs=2)
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
    world = make_world()
    world.add(request(0, prompt=3, max_tokens=5))
    plan = world.plan()
    assert plan is not None
    with pytest.raises(ProtocolError):
        world.scheduler.step_result(StepResult(plan.step + 1, [Sampled(1)], {}, 0.0, 0.0), 0.0)
    with pytest.raises(ProtocolError):
        world.scheduler.step_result(StepResult(plan.step, [], {}, 0.0, 0.0), 0.0)


# -------------------------------------------------------------------- what the client is told


def test_scoring_a_prompt_takes_no_token_and_all_of_its_logprobs() -> None:
    world = make_world(max_num_batched_tokens=4)
    world.add(request(0, prompt=10, max_tokens=0, prompt_logprobs=0))
    assert rows_of(world.plan()) == [(0, 4, False)]
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
    entries = [TokenLogprob(5, -0.5, 1, (5,), (-0.5,)), TokenLogprob(6, -0.25, 1, (6,), (-0.25,))]
    for entry in entries:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.step_result(StepResult(plan.step, [Sampled(entry.token_id, entry)], {}, 0.0, 0.0), now=1.0)
    items = [item for m in scheduler.take_messages() if isinstance(m, TokensOut) for item in m.items]
    assert [(item.token_ids, item.logprobs) for item in items] == [([5], [entries[0]]), ([6], [entries[1]])]


def test_a_step_makes_one_message() -> None:
    world = make_world()
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
    world = make_world(max_num_batched_tokens=6)
    world.add(request(0, prompt=10, max_tokens=4))
    world.add(request(1, prompt=2, max_tokens=4), script=[7, STOP_TOKEN])
    world.run()
    report = world.scheduler.load_report()
    assert (report.prompt_tokens, report.generation_tokens) == (12, 6)
    assert report.steps >= 5


def least_step_time(requests: int) -> float:
    """Seconds of CPU that the router takes for a step of this many requests, the least of 60."""
    scheduler = Scheduler(Limits(requests * 300, requests, 300, 2048, 1000))
    for id in range(requests):
        scheduler.add(request(id, prompt=8, max_tokens=200))
    times = []
    for _ in range(60):
        start = time.thread_time()
        plan = scheduler.plan(0.0)
        planned = time.thread_time()
        assert plan is not None
        result = StepResult(plan.step, [Sampled(7) for row in plan.rows if row.sample], {}, 0.0, 0.0)
        stepped = time.thread_time()
        scheduler.step_result(result, 0.0)
        scheduler.take_messages()
        times.append(planned - start + time.thread_time() - stepped)
    return min(times)


def test_a_step_takes_time_in_proportion_to_its_requests() -> None:
    """0.1 ms for 256 on a fast machine. Whatever the machine: 16 times the requests take 16 times as long at most, not
    256 times."""
    few = least_step_time(32)
    assert least_step_time(512) < 48 * few

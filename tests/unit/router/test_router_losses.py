"""What becomes of requests when the worker is lost with all KV, and another one takes its place."""

from __future__ import annotations

from array import array

import msgspec

from moeserve.messages.schema import Resumed
from moeserve.messages.steps import StepPlan
from tests.support.router.checking_worker import STOP_TOKEN
from tests.support.router.router_world import World, final_error, final_item, make_world, request


def run_with_poison(world: World, poison: int, at: int = 0, *, by_itself: bool = True) -> int:
    """Runs until nothing is left; the worker is lost in each step in which it would sample the token `at` of the
    request `poison`. How often that was."""
    losses = 0
    for _ in range(1000):
        while world.plan() is not None:
            pass
        if not world.in_flight:
            return losses
        if crashes(world, world.in_flight[0], poison, at):
            losses += 1
            world.lose_worker()
            assert world.plan() is None
            world.find_worker(crashed_by_itself=by_itself)
        else:
            world.result()
        world.check()
    raise AssertionError("no end in sight")


def crashes(world: World, plan: StepPlan, poison: int, at: int) -> bool:
    slots = {slot: bound.new_seq for slot, bound in world.worker.bound.items()}
    slots |= {new.req_slot: new for new in plan.new_seqs}
    return any(
        row.sample
        and slots[row.req_slot].sampling.seed == poison
        and row.start + row.count - slots[row.req_slot].num_prompt == at
        for row in plan.rows
    )


def test_requests_go_on_from_their_tokens() -> None:
    world = make_world(max_num_batched_tokens=16)
    for id in range(4):
        world.add(request(id, prompt=10, max_tokens=8), script=[10 * id + i for i in range(8)])
    world.add(request(4, prompt=10, max_tokens=8, prompt_logprobs=0), script=[5, STOP_TOKEN])
    for _ in range(4):
        world.plan()
        world.plan()
        world.result()
    begun = [len(world.seen[id].tokens) for id in range(4)]
    assert sum(begun) > 0
    world.lose_worker()
    world.check()
    assert world.plan() is None
    assert world.scheduler.load_report().kv_slots_used == 0
    assert world.scheduler.load_report().kv_slots_cached == 0
    world.find_worker()
    world.run()
    for id in range(4):
        assert world.seen[id].tokens == [10 * id + i for i in range(8)]
        usage = final_item(world, id).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (10, 8, 0)
    assert world.seen[4].prompt_logprobs == list(range(1, 10))
    assert final_item(world, 4).finish_reason == "stop"
    world.check_all_free()


def test_another_router_goes_on_from_the_tokens_that_a_client_has() -> None:
    """Whatever it has: nothing, a part of the prompt's logprobs, tokens. Even where the queue is full."""
    script = [50 + i for i in range(8)]
    for steps in range(12):
        lost = make_world(max_num_batched_tokens=4)
        lost.add(request(0, prompt=10, max_tokens=8, prompt_logprobs=0), script=script)
        for _ in range(steps):
            lost.plan()
            lost.result()
        had = lost.seen[0]
        if had.final is not None:
            break
        world = make_world(max_num_batched_tokens=4, max_num_queued_reqs=0)
        so_far = array("i", had.tokens).tobytes()
        resumed = Resumed(
            so_far, len(had.prompt_logprobs), 0 if had.tokens else None, 5.0 if had.tokens else None
        )
        again = request(0, prompt=10, max_tokens=8, prompt_logprobs=0)
        world.add(msgspec.structs.replace(again, resumed=resumed), script=script)
        world.now = 20.0
        world.run()
        assert had.tokens + world.seen[0].tokens == script
        assert had.prompt_logprobs + world.seen[0].prompt_logprobs == list(range(1, 10))
        usage = final_item(world, 0).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (10, 8, 0)
        assert usage.decode_ms >= 0
        assert usage.prefill_ms == (5e3 if had.tokens else usage.prefill_ms)
        world.check_all_free()
    assert steps > 8


def test_requests_that_come_meanwhile_wait() -> None:
    world = make_world()
    world.lose_worker()
    world.add(request(0, prompt=3, max_tokens=2))
    world.abort(7)
    assert world.plan() is None
    world.find_worker()
    world.run()
    assert final_item(world, 0).finish_reason == "length"


def test_a_request_that_crashes_every_worker_ends_alone() -> None:
    for at in (0, 3):
        world = make_world(max_num_batched_tokens=16)
        for id in range(6):
            world.add(request(id, prompt=10, max_tokens=8))
        assert run_with_poison(world, poison=2, at=at) == 2
        error = final_error(world, 2)
        assert error.status == 500
        assert "crashed 2 times" in error.message
        for id in {*range(6)} - {2}:
            assert world.seen[id].tokens == [100 + i for i in range(8)]
        world.check_all_free()


def test_one_that_looks_as_if_it_was_killed_from_outside_takes_longer() -> None:
    """Nobody is suspected at first: all go on together."""
    world = make_world(max_num_batched_tokens=16)
    for id in range(6):
        world.add(request(id, prompt=2, max_tokens=8))
    assert run_with_poison(world, poison=2, at=3, by_itself=False) == 5
    assert "crashed 5 times" in final_error(world, 2).message
    assert all(len(world.seen[id].tokens) == 8 for id in {*range(6)} - {2})


def test_losses_with_tokens_in_between_are_nobodys_fault() -> None:
    world = make_world()
    world.add(request(0, prompt=5, max_tokens=30))
    for _ in range(10):
        for _ in range(2):
            world.plan()
            world.result()
        world.plan()
        world.lose_worker()
        world.find_worker()
    world.run()
    assert world.seen[0].tokens == [100 + i for i in range(30)]


def test_without_continuation_only_what_ran_fails() -> None:
    world = make_world(max_num_seqs=1)
    world.add(request(0, prompt=5, max_tokens=5))
    world.add(request(1, prompt=5, max_tokens=5))
    world.plan()
    world.lose_worker(go_on=False)
    world.find_worker()
    world.run()
    assert final_error(world, 0).status == 500
    assert len(world.seen[1].tokens) == 5

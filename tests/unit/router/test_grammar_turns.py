"""Costly grammars: their rows take turns, and one whose mask is late holds nobody up."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from moeserve.messages.steps import Sampled, StepPlan, StepResult
from moeserve.router.core.policy.grammar_turns import MOST_CREDIT_MS, SHARE_BESIDE_OTHERS
from tests.support.router.router_world import World, final_item, make_world, request

STEP_MS = 3.0


@dataclass
class Grammars:
    """A worker whose masks take the milliseconds of `costs`, and whose grammars are compiled in the step `ready_at`, by
    request; one row of each that is not is late, and so are all until the request is bound again. Later masks are late
    in the steps of `late_in`, or where the thread that makes them one after another has `share` of the steps' time."""

    world: World
    costs: dict[int, float] = field(default_factory=dict)
    ready_at: dict[int, int] = field(default_factory=dict)
    late_in: dict[int, Collection[int]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # request slots
    share: float = math.inf
    pending: deque[int] = field(default_factory=deque)  # requests whose masks are to be made
    made_ms: float = 0.0  # of the first one's
    rows: list[set[int]] = field(default_factory=list)  # by step: requests that had a row
    lates: list[set[int]] = field(default_factory=list)  # those that were late

    def run(self) -> None:
        self.world.worker.step = self.step(self.world.worker.step)  # type: ignore[method-assign, assignment]
        self.world.step_ms = lambda result: STEP_MS
        self.world.run(5000)
        self.world.check_all_free()

    def step(self, compute: Callable[[StepPlan], StepResult]) -> Callable[[StepPlan], StepResult]:
        def step(plan: StepPlan) -> StepResult:
            self.late -= {new.req_slot for new in plan.new_seqs}
            result = compute(plan)
            sampling = [row.req_slot for row in plan.rows if row.sample]
            ids = [self.world.worker.bound[slot].id for slot in sampling]
            self.rows.append(set(ids))
            sampled = list(result.sampled)
            for index, (slot, id) in enumerate(zip(sampling, ids, strict=True)):
                is_late = plan.step < self.ready_at.get(id, 0) or plan.step in self.late_in.get(id, ())
                if slot in self.late or is_late or id in self.pending:
                    self.late.add(slot)
                    self.world.worker.bound[slot].tokens[-1] = -5  # what a row of the plan in flight reads
                    sampled[index] = Sampled(-1, late=True)
            late = {id for id, one in zip(ids, sampled, strict=True) if one.late}
            self.lates.append(late)
            mask_ms = {i: self.costs[id] for i, id in enumerate(ids) if id in self.costs.keys() - late}
            self.make_masks([ids[index] for index in mask_ms])
            return msgspec.structs.replace(result, sampled=sampled, mask_ms=mask_ms)

        return step

    def make_masks(self, asked: list[int]) -> None:
        """During one step, of which these have got a token."""
        self.pending += asked
        self.made_ms += STEP_MS * self.share
        while self.pending and self.made_ms >= self.costs[self.pending[0]]:
            self.made_ms -= self.costs[self.pending.popleft()]
        if not self.pending:
            self.made_ms = 0.0


def test_costly_rows_take_turns_and_the_others_are_in_every_step() -> None:
    world = make_world()
    for id in range(4):
        world.add(request(id, prompt=4, max_tokens=60))
    grammars = Grammars(world, costs={0: 17.0, 1: 17.0, 2: 17.0})
    grammars.run()
    together = [rows for rows in grammars.rows if 3 in rows]
    assert len(together) == 60
    costs = [sum(grammars.costs.get(id, 0.0) for id in rows) for rows in together[3:]]
    assert sum(costs) <= STEP_MS * len(costs) + 2 * MOST_CREDIT_MS
    assert max(costs) <= 2 * MOST_CREDIT_MS
    shares = [sum(id in rows for rows in together) for id in range(3)]
    assert min(shares) >= 3
    assert max(shares) - min(shares) <= 1
    alone = grammars.rows[len(together) + 8 :]
    assert all(alone), "where there is no other, one of them is in each step"
    assert all(len(world.seen[id].tokens) == 60 for id in range(4))


def test_beside_another_key_they_get_less() -> None:
    world = make_world()
    world.add(request(0, prompt=4, max_tokens=400, key_name="little"))
    for id in range(1, 4):
        world.add(request(id, prompt=4, max_tokens=20, key_name="much"))
    grammars = Grammars(world, costs={1: 17.0, 2: 17.0, 3: 17.0})
    grammars.run()
    together = [rows for rows in grammars.rows if 0 in rows]
    assert len(together) == 400
    costs = [sum(grammars.costs.get(id, 0.0) for id in rows) for rows in together[3:]]
    assert 0 < sum(costs) <= SHARE_BESIDE_OTHERS * STEP_MS * len(costs) + 2 * MOST_CREDIT_MS
    assert all(len(world.seen[id].tokens) == 20 for id in range(1, 4))


def test_a_thread_that_cannot_keep_up_makes_few_steps_wait() -> None:
    """As on a busy machine. What was late is as costly as before."""
    world = make_world()
    world.add(request(0, prompt=4, max_tokens=400, key_name="little"))
    for id in range(1, 13):
        world.add(request(id, prompt=4, max_tokens=15, key_name="much"))
    grammars = Grammars(world, costs=dict.fromkeys(range(1, 13), 2.0), share=SHARE_BESIDE_OTHERS / 3)
    grammars.run()
    steps = [step for step, rows in enumerate(grammars.rows) if 0 in rows][60:]
    late = [len(grammars.lates[step]) for step in steps]
    got = sum(len(grammars.rows[step] - grammars.lates[step]) - 1 for step in steps)
    assert sum(map(bool, late)) < len(steps) / 4, "a step with a late row waits for it"
    assert sum(late) < got, "a late row is computed in vain"
    assert got > 0.8 * sum(STEP_MS * grammars.share / 2.0 for _ in steps), "and the thread is never idle"
    assert all(seen.final is not None for seen in world.seen.values())


def test_keys_take_turns_before_requests_do() -> None:
    world = make_world()
    world.add(request(0, prompt=4, max_tokens=20, key_name="little"))
    for id in range(1, 7):
        world.add(request(id, prompt=4, max_tokens=20, key_name="much"))
    grammars = Grammars(world, costs=dict.fromkeys(range(7), 17.0))
    grammars.run()
    until_end = max(step for step, rows in enumerate(grammars.rows) if 0 in rows)
    assert until_end < 60  # of 140


def test_cheap_masks_are_never_held_back() -> None:
    world = make_world()
    for id in range(4):
        world.add(request(id, prompt=4, max_tokens=10))
    grammars = Grammars(world)
    grammars.run()
    assert sum(rows == {0, 1, 2, 3} for rows in grammars.rows) == 10


def test_a_request_whose_grammar_is_late_leaves_the_batch_and_comes_back() -> None:
    for num_state_slots in (0, 32):
        world = make_world(num_state_slots=num_state_slots)
        for id in range(3):
            world.add(request(id, prompt=30, max_tokens=40), script=[10 * id + i for i in range(40)])
        grammars = Grammars(world, ready_at={0: 25, 1: 60})
        grammars.run()
        for id in range(3):
            assert world.seen[id].tokens == [10 * id + i for i in range(40)]
            usage = final_item(world, id).usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (30, 40, 0)
        assert sum(1 in rows for rows in grammars.rows[:60]) <= 14  # it is not tried in every step
        assert sum(2 in rows for rows in grammars.rows[:45]) == 40
        assert world.scheduler.load_report().preemptions == 0


def test_a_late_request_that_is_alone_is_tried_until_it_is_ready() -> None:
    world = make_world()
    world.add(request(0, prompt=3, max_tokens=2))
    Grammars(world, ready_at={0: 9}).run()
    assert final_item(world, 0).finish_reason == "length"


def test_a_mask_that_is_late_now_and_then_costs_a_few_steps_each_time() -> None:
    """Nothing is lost or said twice, and what was late before is not made to wait longer for it."""
    world = make_world()
    for id in range(2):
        world.add(request(id, prompt=30, max_tokens=200), script=[100 * id + i % 90 for i in range(200)])
    late_in = range(20, 180, 16)
    grammars = Grammars(world, late_in={1: late_in})
    grammars.run()
    for id in range(2):
        assert world.seen[id].tokens == [100 * id + i % 90 for i in range(200)]
    for step in late_in:
        assert sum(1 in rows for rows in grammars.rows[step : step + 16]) >= 10
    assert all(0 in rows for rows in grammars.rows[1:190])


def test_late_requests_may_leave_at_any_time() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        world = make_world(num_state_slots=rng.choice((0, 32)))
        for id in range(6):
            world.add(request(id, prompt=rng.randrange(1, 20), max_tokens=rng.randrange(1, 12)))
        grammars = Grammars(
            world,
            ready_at={id: rng.randrange(40) for id in range(5)},
            late_in={id: rng.sample(range(80), 20) for id in range(5)},
        )
        world.worker.step = grammars.step(world.worker.step)  # type: ignore[method-assign, assignment]
        for _ in range(30):
            while rng.random() < 0.8 and world.plan() is not None:
                pass
            world.result()
            if rng.random() < 0.1:
                world.abort(rng.randrange(6))
            world.check()
        world.run()
        world.check_all_free()
        assert all(seen.final is not None for seen in world.seen.values())

"""Recurrent states that accepted drafts of a GPU's last step have yet to change, when the next plan moves states
between slots and tiers: with a model whose state is the number of tokens that it has consumed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.messages.pages import PAGE_KEY_BYTES, PageOrders, StateCopy
from moeserve.messages.steps import Row, StepPlan
from moeserve.worker.engines.gpu.drafted_choice import DraftedChoice
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.block_steps import MOST_LEFT, BlockSteps
from moeserve.worker.plans.plan_orders import PlanOrders
from moeserve.worker.sequences import StepLayout

SLOT, OTHER, TOKENS, ACCEPTED, LOADED = 1, 2, 10, 2, 50
KEY = bytes(PAGE_KEY_BYTES)
ROW = Row(0, 12, 1, np.zeros(1, np.int32).tobytes(), True)


class World:
    """A GPU engine with states of one number each, and a tier, after a step with drafts."""

    def __init__(self) -> None:
        self.states = [0, TOKENS, 0]
        self.written: list[int] = []
        model: Any = SimpleNamespace(
            device=torch.device("cpu"),
            has_state_drafts=True,
            commit_states=self._commit,
            copy_states=self._copy,
        )
        engine: Any = object.__new__(GpuEngine)
        engine._model, engine._cpu_stage, engine.block_steps = model, None, None
        engine._drafted = DraftedChoice(model, None, None, 2)  # type: ignore[arg-type]
        engine._state_slots = np.array([SLOT], np.int32)
        pages: Any = SimpleNamespace(write=self._write, load=self._load)
        self.orders = PlanOrders(engine, pages, None)
        kv_slots = np.zeros(1 + ACCEPTED, np.int32).tobytes()
        step = StepLayout([Row(0, TOKENS - 1, 1 + ACCEPTED, kv_slots, True)], [ACCEPTED])
        engine.commit_states(step, np.array([ACCEPTED], np.int32))
        self.engine = engine

    def _commit(self, moved: torch.Tensor, count: int) -> None:
        slots, _, accepted = moved[:, :count].tolist()
        for slot, more in zip(slots, accepted, strict=True):
            self.states[slot] += more

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.states[target] = 0 if source < 0 else self.states[source]

    def _write(self, orders: PageOrders, wrong: object) -> None:
        self.written += [self.states[state.slot] for state in orders.state_writes]

    def _load(self, orders: PageOrders) -> None:
        for state in orders.state_loads:
            self.states[state.slot] = LOADED


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("rows", [[], [ROW]], ids=["without rows", "with rows"])
def test_a_tier_gets_the_state_with_the_accepted_drafts(world: World, rows: list[Row]) -> None:
    world.orders.execute(StepPlan(2, [], rows, pages=PageOrders(state_writes=[StateCopy(KEY, SLOT)])))
    assert world.written == [TOKENS + ACCEPTED]


@pytest.mark.parametrize("rows", [[], [ROW]], ids=["without rows", "with rows"])
def test_drafts_of_an_ended_request_do_not_change_a_loaded_state(world: World, rows: list[Row]) -> None:
    world.orders.execute(StepPlan(2, [], rows, pages=PageOrders(state_loads=[StateCopy(KEY, SLOT)])))
    world.engine.settle_states()
    assert world.states[SLOT] == LOADED


def test_a_copy_has_the_accepted_drafts(world: World) -> None:
    world.orders.execute(StepPlan(2, [], [ROW], np.array([SLOT, OTHER], np.int32).tobytes()))
    assert world.states[OTHER] == TOKENS + ACCEPTED


def test_a_plan_without_orders_leaves_the_drafts_to_its_rows(world: World) -> None:
    """The chain of the next drafts, for which the GPU waits, is launched first; `forward` settles the states."""
    world.orders.execute(StepPlan(2, [], [ROW]))
    assert world.states[SLOT] == TOKENS
    world.orders.execute(StepPlan(3, [], []))
    assert world.states[SLOT] == TOKENS + ACCEPTED


def test_rows_that_a_block_left_are_zeroed_together(world: World) -> None:
    """When there are many, before a tier reads them, and before the block keeps up again."""
    cleared: list[list[int]] = []

    def clear(kv_slots: torch.Tensor, count: torch.Tensor) -> None:
        cleared.append(kv_slots[: int(count)].tolist())

    block: Any = SimpleNamespace(clear_rows=clear)
    kept: list[int] = []
    model: Any = SimpleNamespace(
        device=torch.device("cpu"), next_token=block, keep_up=lambda _: kept.append(len(cleared))
    )
    steps = BlockSteps(model, {}, [])
    world.engine.block_steps, steps._batch = steps, lambda _: None  # type: ignore[method-assign, assignment, return-value]

    def leave(*slots: int) -> None:
        steps.keeping.is_on = False
        steps.launch(8, np.array(slots, np.int32), is_replayed=True)

    for slot in range(3):
        leave(slot)
    world.orders.execute(StepPlan(2, [], [ROW]))
    assert not cleared
    world.orders.execute(StepPlan(3, [], [ROW], pages=PageOrders()))
    assert cleared == [[0, 1, 2]]
    leave(*range(MOST_LEFT))
    leave(7, 8)
    assert cleared[1:] == [list(range(MOST_LEFT))]
    steps.keeping.is_on = True
    steps.launch(8, np.array([9], np.int32), is_replayed=False)
    assert cleared[2:] == [[7, 8]]
    assert kept == [3]

"""The model of step times: what it learns from noisy steps, what it keeps, what it makes of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.router.core.policy.step_cost import FIRST_CHUNK, StepCost, StepShape, chunk_context

EXPERTS, PER_TOKEN = 128, 8


def true_ms(shape: StepShape) -> float:
    """Dense weights, the distinct experts, computing, attention."""
    experts = 1.0 - (1.0 - PER_TOKEN / EXPERTS) ** (shape.rows + shape.prompt)
    computing = 0.3 * shape.rows + 1.25 * shape.prompt
    return 7.5 + 84.0 * experts + computing + 2e-4 * shape.decode_context + 2.5e-4 * shape.prompt_context


def random_shape(rng: random.Random, *, prompt: bool) -> StepShape:
    rows = rng.choice([0, 1, 2, 4, 8, 16]) if prompt else rng.choice([1, 1, 2, 4, 8])
    tokens = rng.choice([8, 16, 40, 100, 300, 512]) if prompt else 0
    start = rng.randrange(8000)
    return StepShape(rows, rows * rng.randrange(4000), tokens, chunk_context(start, tokens))


def taught(steps: int = 300, noise: float = 0.1, seed: int = 0) -> StepCost:
    rng = random.Random(seed)
    cost = StepCost(EXPERTS, PER_TOKEN)
    for _ in range(steps):
        shape = random_shape(rng, prompt=rng.random() < 0.3)
        cost.observe(shape, true_ms(shape) * rng.lognormvariate(0.0, noise))
    return cost


def worst_error(cost: StepCost, *, prompt: bool) -> float:
    rng = random.Random(99)
    shapes = [random_shape(rng, prompt=prompt) for _ in range(300)]
    return max(abs(cost.predict(shape) / true_ms(shape) - 1.0) for shape in shapes)


def test_it_learns_what_steps_cost() -> None:
    for seed in range(5):
        cost = taught(seed=seed)
        assert worst_error(cost, prompt=False) < 0.15
        assert worst_error(cost, prompt=True) < 0.15


def test_it_learns_that_on_a_gpu_small_chunks_cost_as_much_as_large_ones() -> None:
    """An H200 with 48 layers of the 30B-A3B shape, measured at its start: recorded decode steps, launched prompts."""
    cost = StepCost(EXPERTS, PER_TOKEN)
    for rows, ms in ((1, 1.75), (8, 4.5), (64, 12.4), (128, 21.3), (256, 28.6)):
        cost.observe(StepShape(rows, rows * (rows + 1) // 2), ms)
    prompts = (
        (16, 25.0),
        (64, 26.0),
        (128, 28.0),
        (256, 33.0),
        (512, 34.0),
        (1024, 46.0),
        (2048, 89.0),
        (4096, 203.0),
    )
    for tokens, ms in prompts:
        cost.observe(StepShape(0, 0, tokens, chunk_context(0, tokens), tokens), ms)
    for rows in (1, 64):
        assert cost.fixed_ms(rows) > 12.0
    for tokens, ms in prompts:
        assert cost.predict(StepShape(0, 0, tokens, chunk_context(0, tokens), tokens)) == pytest.approx(
            ms, rel=0.35
        )
    # 50 ms beside 64 rows: not a few hundred tokens, each of which would cost ten times as much.
    assert cost.largest_chunk(64, 0, 8192, 50.0 - 12.4, span=0) > 500


def test_hours_of_decoding_do_not_wash_out_what_prompts_cost() -> None:
    cost = taught()
    rng = random.Random(1)
    for _ in range(20_000):
        shape = StepShape(1, rng.randrange(8000))
        cost.observe(shape, true_ms(shape) * rng.lognormvariate(0.0, 0.1))
    assert worst_error(cost, prompt=True) < 0.25


def test_it_follows_a_machine_that_gets_slower() -> None:
    cost = taught()
    rng = random.Random(2)
    for _ in range(400):
        shape = random_shape(rng, prompt=rng.random() < 0.3)
        cost.observe(shape, 2.0 * true_ms(shape))
    shape = StepShape(4, 4000, 100, chunk_context(1000, 100))
    assert cost.predict(shape) == pytest.approx(2.0 * true_ms(shape), rel=0.15)


def test_one_step_that_took_a_hundred_times_as_long_changes_little() -> None:
    cost = taught()
    shape = StepShape(2, 2000, 100, chunk_context(1000, 100))
    before = cost.predict(shape)
    cost.observe(shape, 100 * before)
    assert cost.predict(shape) == pytest.approx(before, rel=0.25)


def test_of_large_chunks_alone_it_does_not_conclude_that_small_ones_cost_as_much() -> None:
    """Else smaller ones would never be tried, and it would never find out."""
    cost = StepCost(EXPERTS, PER_TOKEN)
    for start in range(0, 16_000, 512):
        shape = StepShape(prompt=512, prompt_context=chunk_context(start, 512))
        cost.observe(shape, true_ms(shape))
    assert cost.fixed_ms(0) < 0.3 * true_ms(StepShape(prompt=512, prompt_context=chunk_context(0, 512)))


def test_most_steps_keep_below_the_spread() -> None:
    cost = taught(noise=0.2, steps=2000)
    rng = random.Random(5)
    above = 0
    for _ in range(1000):
        shape = random_shape(rng, prompt=True)
        above += true_ms(shape) * rng.lognormvariate(0.0, 0.2) > cost.predict(shape) * cost.spread
    assert above / 1000 < 0.15


def test_before_the_first_step_nothing_costs_anything_and_little_is_tried() -> None:
    cost = StepCost()
    assert not cost.is_fitted
    assert cost.predict(StepShape(rows=3, prompt=100)) == 0.0
    assert cost.largest_trial == FIRST_CHUNK
    cost.observe(StepShape(prompt=512), 0.0)
    assert not cost.is_fitted, "0 ms: nobody measured it"
    cost.observe(StepShape(prompt=512), 100.0)
    assert cost.largest_trial == 1024


SHAPES = st.builds(
    StepShape, st.integers(0, 64), st.integers(0, 10_000), st.integers(0, 512), st.integers(0, 1_000_000)
)


@given(
    steps=st.lists(st.tuples(SHAPES, st.floats(0.01, 1e5)), min_size=1, max_size=40),
    experts=st.sampled_from([(0, 0), (1, 1), (128, 8)]),
    before=st.integers(0, 64),
    start=st.integers(0, 10_000),
    budget=st.floats(0, 1e4),
)
def test_whatever_it_saw_it_stays_sane(
    steps: list[tuple[StepShape, float]], experts: tuple[int, int], before: int, start: int, budget: float
) -> None:
    cost = StepCost(*experts)
    for shape, ms in steps:
        cost.observe(shape, ms)
    costs = [cost.chunk_ms(before, start, n, span=0) for n in range(0, 200, 7)]
    assert costs == sorted(costs), "more tokens never cost less"
    assert costs[0] == 0.0
    assert cost.fixed_ms(before) >= 0.0
    most = cost.largest_chunk(before, start, 200, budget, span=0)
    assert 0 <= most <= 200
    assert cost.chunk_ms(before, start, most, span=0) <= budget
    assert most == 200 or cost.chunk_ms(before, start, most + 1, span=0) > budget

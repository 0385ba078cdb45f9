"""Who may join: the peak estimate against simulation, predictions against the history, and the free list."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.messages.slot_kinds import SlotKind
from moeserve.router.core.batch.admission import peak_tokens
from moeserve.router.core.batch.output_history import PRIOR, WINDOW, OutputHistory
from moeserve.router.core.memory.token_pool import PoolExhausted, TokenPool

LENGTHS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


def test_peak_of_the_worked_example() -> None:
    assert peak_tokens([(5, 4), (4, 3), (5, 3), (3, 2), (4, 2)]) == 31


@given(LENGTHS)
def test_peak_is_what_a_simulation_in_lockstep_finds(lengths: list[tuple[int, int]]) -> None:
    at_each_step = [
        sum(held + step for held, remaining in lengths if step <= remaining) for step in range(21)
    ]
    assert peak_tokens(lengths) == max(at_each_step)


def test_predictions_have_the_distribution_of_the_answers() -> None:
    rng = random.Random(0)
    lengths = [max(1, int(rng.expovariate(1 / 200))) for _ in range(WINDOW)]
    history = OutputHistory()
    for length in lengths:
        history.add(length)
    draws = [history.predict(0, 10_000, history.draw()) for _ in range(2000)]
    assert sum(draws) / 2000 == pytest.approx(sum(lengths) / WINDOW, rel=0.05)
    late = [history.predict(300, 10_000, history.draw()) for _ in range(2000)]
    longer = [length for length in lengths if length > 300]
    assert min(late) > 300
    assert sum(late) / 2000 == pytest.approx(sum(longer) / len(longer), rel=0.05)


@given(
    added=st.lists(st.integers(0, 500), max_size=50),
    so_far=st.integers(0, 3000),
    more=st.integers(1, 3000),
    quantile=st.floats(0, 1, exclude_max=True),
)
def test_a_prediction_is_beyond_what_is_there_and_within_what_may_come(
    added: list[int], so_far: int, more: int, quantile: float
) -> None:
    history = OutputHistory()
    for length in added:
        history.add(length)
    assert so_far < history.predict(so_far, so_far + more, quantile) <= so_far + more


def test_history_forgets_the_oldest() -> None:
    history = OutputHistory()
    for _ in range(WINDOW):
        history.add(5)
    assert history.mean == 5, f"nothing is left of {PRIOR}"
    assert history.predict(0, 1000, 0.99) == 5
    assert 5 < history.predict(5, 1000, 0.5) < 50, "longer than any before: a little more"


def test_pool_hands_out_each_slot_once_and_ascending() -> None:
    pool = TokenPool(8)
    first = pool.alloc(range(3))
    second = pool.alloc(range(5))
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4, 5, 6, 7]
    with pytest.raises(PoolExhausted):
        pool.alloc([7])
    pool.check([first, second])
    pool.free(first)
    assert pool.num_free == 3
    assert pool.alloc([]).tolist() == []
    assert sorted(pool.alloc(range(3))) == [0, 1, 2]


def test_slots_of_a_kind_go_to_the_ends_of_its_blocks() -> None:
    """Slots 0 and 1 have room for blocks of 8 and 2, slots 2 to 5 for blocks of 2; the others for none."""
    pool = TokenPool(12, [SlotKind(8, 2), SlotKind(2, 4)])
    first = pool.alloc(range(8))
    assert first.tolist() == [6, 2, 7, 3, 8, 4, 9, 0]
    assert pool.lacking([1, 3]) == 1
    with pytest.raises(PoolExhausted):
        pool.alloc([1, 3])
    assert pool.alloc([5, 15]).tolist() == [5, 1]
    assert pool.num_free == 2
    pool.free(first[:2])
    assert pool.num_free == 4
    assert pool.alloc([1]).tolist() == [2]
    assert pool.lacking(range(20, 25)) == 2
    pool.check([first[2:], array("i", [5, 1, 2])])
    with pytest.raises(AssertionError, match=r"\[2\]"):
        pool.check([first[2:], array("i", [5, 1])])


def test_pool_check_finds_a_leak_and_a_double_owner() -> None:
    pool = TokenPool(4)
    held = pool.alloc(range(2))
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        pool.check([])
    pool.free(array("i", held[:1]))
    with pytest.raises(AssertionError, match=r"\[0\]"):
        pool.check([held])

"""The two questions of admission, against simulation and against trying every order."""

from __future__ import annotations

from array import array
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.router.core.admission import is_safe, peak_tokens, safe_grants
from moeserve.router.core.token_pool import PoolExhausted, TokenPool

LENGTHS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


def test_peak_of_the_worked_example() -> None:
    assert peak_tokens([(5, 4), (4, 3), (5, 3), (3, 2), (4, 2)]) == 31


@given(LENGTHS)
def test_peak_is_what_a_simulation_in_lockstep_finds(lengths: list[tuple[int, int]]) -> None:
    at_each_step = [
        sum(held + step for held, remaining in lengths if step <= remaining) for step in range(21)
    ]
    assert peak_tokens(lengths) == max(at_each_step)


CLAIMS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=5).map(
    lambda pairs: [(need, held, id) for id, (need, held) in enumerate(pairs)]
)


def can_finish_in_some_order(free: int, claims: list[tuple[int, int, int]]) -> bool:
    def works(order: tuple[tuple[int, int, int], ...]) -> bool:
        left = free
        for need, held, _ in order:
            if need > left:
                return False
            left += held
        return True

    return any(works(order) for order in permutations(claims))


@given(free=st.integers(0, 12), claims=CLAIMS)
def test_safe_means_that_some_order_works(free: int, claims: list[tuple[int, int, int]]) -> None:
    assert is_safe(free, claims) == can_finish_in_some_order(free, claims)


@given(free=st.integers(0, 12), claims=CLAIMS, data=st.data())
def test_grants_keep_a_safe_state_safe_and_let_somebody_on(
    free: int, claims: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    if not is_safe(free, claims):
        return
    wants = {id: data.draw(st.integers(0, need)) for need, _, id in claims}
    grants = safe_grants(free, claims, wants)
    assert all(0 <= grants[id] <= wants[id] for _, _, id in claims)
    assert sum(grants.values()) <= free
    assert is_safe(
        free - sum(grants.values()), [(need - grants[id], held + grants[id], id) for need, held, id in claims]
    )
    if claims:
        _, _, first = min(claims)
        assert grants[first] == wants[first]


def test_pool_hands_out_each_slot_once_and_ascending() -> None:
    pool = TokenPool(8)
    first = pool.alloc(3)
    second = pool.alloc(5)
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4, 5, 6, 7]
    with pytest.raises(PoolExhausted):
        pool.alloc(1)
    pool.check([first, second])
    pool.free(first)
    assert (pool.num_free, pool.num_used) == (3, 5)
    assert pool.alloc(0).tolist() == []
    assert sorted(pool.alloc(3)) == [0, 1, 2]


def test_pool_check_finds_a_leak_and_a_double_owner() -> None:
    pool = TokenPool(4)
    held = pool.alloc(2)
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        pool.check([])
    pool.free(array("i", held[:1]))
    with pytest.raises(AssertionError, match=r"\[0\]"):
        pool.check([held])

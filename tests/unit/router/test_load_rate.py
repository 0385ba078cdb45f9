"""Whether a load pays, by the measured rates."""

from __future__ import annotations

from moeserve.router.core.load_rate import RETRY_AFTER, LoadRates


def test_a_tier_of_unknown_rate_is_tried() -> None:
    assert LoadRates(1).admits([100], 50.0)


def test_what_computing_costs_may_be_unknown() -> None:
    """Then a load may take some seconds, not minutes."""
    rates = LoadRates(1)
    rates.observe(0, 10, 1000.0)
    assert rates.admits([100], 0.0)
    assert not rates.admits([10_000], 0.0)


def test_the_faster_way_is_taken() -> None:
    rates = LoadRates(1)
    rates.observe(0, 1000, 100.0)  # 10 tokens a millisecond
    assert rates.admits([1000], 101.0)
    assert not rates.admits([1000], 99.0)
    assert rates.num_declined == [1]


def test_a_tier_that_was_slow_is_measured_again() -> None:
    rates = LoadRates(1)
    rates.observe(0, 10, 1000.0)
    answers = [rates.admits([1000], 100.0) for _ in range(RETRY_AFTER)]
    assert answers == [False] * (RETRY_AFTER - 1) + [True]
    rates.observe(0, 1000, 1.0)
    assert rates.admits([1000], 100.0)


def test_each_tier_has_a_rate() -> None:
    """A load from both takes as long as its parts; what is declined is the slower one's."""
    rates = LoadRates(2)
    rates.observe(0, 1000, 1.0)
    assert rates.admits([10_000, 0], 11.0)
    assert rates.admits([10_000, 500], 11.0), "the second is not known yet"
    rates.observe(1, 100, 1.0)
    assert not rates.admits([10_000, 500], 11.0)
    assert rates.admits([10_000, 500], 16.0)
    assert rates.num_declined == [1, 0]
    assert not rates.admits([0, 5000], 11.0)
    assert rates.num_declined == [1, 1]

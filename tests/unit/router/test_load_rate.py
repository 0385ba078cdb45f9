"""Whether a load pays, by the measured rates."""

from __future__ import annotations

import pytest

from moeserve.messages.pages import Tier, TierCounts
from moeserve.router.core.tiers.load_rate import RETRY_AFTER, LoadRates


def rates_of(*tiers: Tier) -> LoadRates:
    return LoadRates(tiers, [TierCounts() for _ in tiers])


def declined(rates: LoadRates) -> list[int]:
    return [counts.declined for counts in rates.counts]


def test_a_tier_of_unknown_rate_is_tried() -> None:
    assert rates_of("disk").admits([100], 50.0)


def test_what_computing_costs_may_be_unknown() -> None:
    """Then a load may take some seconds, not minutes."""
    rates = rates_of("disk")
    rates.observe(0, 10, 1000.0)
    assert rates.admits([100], 0.0)
    assert not rates.admits([10_000], 0.0)


def test_the_faster_way_is_taken() -> None:
    rates = rates_of("disk")
    rates.observe(0, 1000, 100.0)  # 10 tokens a millisecond
    assert rates.admits([1000], 101.0)
    assert not rates.admits([1000], 99.0)
    assert declined(rates) == [1]


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_tier_that_was_slow_is_measured_again(tier: Tier) -> None:
    rates = rates_of(tier)
    rates.observe(0, 10, 1000.0)
    answers = [rates.admits([1000], 100.0) for _ in range(RETRY_AFTER[tier])]
    assert answers == [False] * (RETRY_AFTER[tier] - 1) + [True]
    rates.observe(0, 1000, 1.0)
    assert rates.admits([1000], 100.0)


def test_each_tier_has_a_rate() -> None:
    """A load from both takes as long as its parts; what is declined is the slower one's."""
    rates = rates_of("ram", "disk")
    rates.observe(0, 1000, 1.0)
    assert rates.admits([10_000, 0], 11.0)
    assert rates.admits([10_000, 500], 11.0), "the second is not known yet"
    rates.observe(1, 100, 1.0)
    assert not rates.admits([10_000, 500], 11.0)
    assert rates.admits([10_000, 500], 16.0)
    assert declined(rates) == [1, 0]
    assert not rates.admits([0, 5000], 11.0)
    assert declined(rates) == [1, 1]


def test_a_slow_tier_is_slow_where_a_report_parts_the_time_from_the_bytes() -> None:
    """A page is read for 200 ms, during which reports tell of other things, and arrives just after one of them; or two
    are read beside each other, and a report tells of the first just before the second arrives."""
    rates = rates_of("disk")
    for ms in (5.0, 190.0, 4.9):
        rates.observe(0, 0, ms)
    assert rates.bytes_per_ms == [None], "nothing has come yet"
    rates.observe(0, 1000, 0.1)
    assert rates.bytes_per_ms == [pytest.approx(1000 / 200)]
    for _ in range(20):
        rates.observe(0, 1000, 200.0)
        rates.observe(0, 1000, 0.01)
        assert (rates.bytes_per_ms[0] or 0.0) < 2 * 2000 / 200


def test_another_worker_s_tiers_are_tried() -> None:
    rates = rates_of("ram", "disk")
    rates.observe(1, 10, 1000.0)
    assert not rates.admits([0, 1000], 100.0)
    rates.reset()
    assert rates.admits([0, 1000], 100.0)
    assert declined(rates) == [0, 1]

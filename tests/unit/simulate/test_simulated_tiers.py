"""The simulator's tiers behind the KV pool: what is read from them, and what it costs to write to them."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from moeserve.cli.simulate.simulation import Simulation, SimulationResult
from moeserve.cli.simulate.step_time import StepTime
from moeserve.cli.simulate.tiers import TierModel
from moeserve.cli.simulate.worker import Timing
from moeserve.cli.workload.shapes import WorkloadShape, generate
from moeserve.messages.pages import Tier, TierCounts
from tests.support.router.simulation import NOTHING_ELSE, TEN_MS, limits, ms, simulate, single

# Four conversations in a pool that holds one: each turn finds others' KV in its place.
CROWDED = generate(WorkloadShape(input_len=320, output_len=32, num_turns=5, think_time=4.0), 20, 1.0, 1.0, 2)
ONE_MS_A_TOKEN = StepTime("1 ms a token", [0, 1], [0.0, 0.001])
SMALL = {"num_kv_slots": 2200, "max_model_len": 2200, "max_num_seqs": 1}


@cache
def with_disk(tokens: int, tokens_per_s: float) -> SimulationResult:
    tier = TierModel(tokens, tokens_per_s)
    return Simulation(
        CROWDED,
        limits(**SMALL, page_tokens=32, page_bytes=32),
        ONE_MS_A_TOKEN,
        NOTHING_ELSE,
        tiers={"disk": tier},
    ).run()


def test_what_the_pool_has_given_up_comes_from_disk() -> None:
    without = simulate(CROWDED, ONE_MS_A_TOKEN, NOTHING_ELSE, None, None, **SMALL)
    result = with_disk(1 << 20, 50_000.0)
    assert [o.output_len for o in result.outcomes] == [o.output_len for o in without.outcomes]
    assert result.report.disk.tokens > 2000
    assert result.report.cached_tokens > without.report.cached_tokens + 0.9 * result.report.disk.tokens
    assert result.report.disk.load_ms == pytest.approx(result.report.disk.tokens / 50.0, rel=0.05)
    assert result.worker_busy < without.worker_busy - 0.9e-3 * result.report.disk.tokens


def test_a_disk_slower_than_computing_is_left_alone() -> None:
    result = with_disk(1 << 20, 300.0)
    assert result.report.disk.tokens <= 3 * 4 * 32, "some windows of four pages"
    assert result.report.disk.declined > 0


def test_a_small_disk_keeps_what_came_last() -> None:
    assert 0 <= with_disk(640, 50_000.0).report.disk.tokens < with_disk(1 << 20, 50_000.0).report.disk.tokens


def test_a_disk_beside_recurrent_state() -> None:
    tier = TierModel(1 << 20, 50_000.0)
    few = limits(**SMALL, page_tokens=32, page_bytes=32, num_state_slots=2)
    result = Simulation(CROWDED, few, ONE_MS_A_TOKEN, NOTHING_ELSE, tiers={"disk": tier}).run()
    assert result.report.disk.tokens > 1000


def test_a_disk_that_writes_slowly_has_less_to_read() -> None:
    def tokens_from_disk(written_per_s: float) -> int:
        tier = TierModel(1 << 20, 50_000.0, written_per_s)
        pages = limits(**SMALL, page_tokens=32, page_bytes=32)
        report = Simulation(CROWDED, pages, ONE_MS_A_TOKEN, NOTHING_ELSE, tiers={"disk": tier}).run().report
        assert report.disk.bytes_written == 32 * report.disk.pages
        return report.disk.tokens

    at_once = with_disk(1 << 20, 50_000.0).report.disk.tokens
    assert tokens_from_disk(20_000.0) > 0.9 * at_once
    assert tokens_from_disk(100.0) < 0.5 * at_once


def test_states_take_the_time_of_their_bytes() -> None:
    few = limits(**SMALL, page_tokens=32, page_bytes=32, num_state_slots=2)

    def report_of(state_tokens: float) -> TierCounts:
        tier = TierModel(1 << 20, 50_000.0, 20_000.0, state_tokens)
        return Simulation(CROWDED, few, ONE_MS_A_TOKEN, NOTHING_ELSE, tiers={"disk": tier}).run().report.disk

    small, large = report_of(0.0), report_of(320.0)
    assert large.load_ms / large.tokens > 1.2 * small.load_ms / small.tokens > 0.0


def test_ram_in_front_of_a_slow_disk() -> None:
    """The disk has all of RAM's; RAM what was used last, and first."""
    tiers: dict[Tier, TierModel] = {"ram": TierModel(3200, 50_000.0), "disk": TierModel(1 << 20, 3000.0)}
    both = limits(**SMALL, page_tokens=32, page_bytes=32, tiers=("ram", "disk"))
    report = Simulation(CROWDED, both, ONE_MS_A_TOKEN, NOTHING_ELSE, tiers=tiers).run().report
    assert report.ram.pages == 100 < report.disk.pages
    assert report.ram.tokens > 500
    assert report.disk.tokens > 500
    assert report.ram.load_ms == pytest.approx(report.ram.tokens / 50.0, rel=0.05)
    assert report.ram.tokens + report.disk.tokens == with_disk(1 << 20, 50_000.0).report.disk.tokens


def test_a_step_is_longer_by_what_is_copied_to_ram() -> None:
    """Five pages of a prompt of 160 tokens, two with each step, at 10,000 tokens a second: 6.4 ms. None of these steps
    is launched ahead; the third is longer by one page, and then nothing is left."""
    ahead = msgspec.structs.replace(TEN_MS, ahead_tokens=256)
    pages = limits(page_tokens=32, page_bytes=32, page_write_bytes=64, tiers=("ram",))
    timing = Timing(frontend=0, reply=0, hop=0, gap=0.001)
    tier = TierModel(3200, 50_000.0, 10_000.0)
    (outcome,) = Simulation(single((1, 160, 8)), pages, ahead, timing, tiers={"ram": tier}).run().outcomes
    assert [ms(gap) for gap in outcome.itls] == [10, 17.4, 17.4, 14.2, 10, 10, 10]

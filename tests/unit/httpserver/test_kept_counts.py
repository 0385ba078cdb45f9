"""Counters that go on where those of a lost httpserver ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.httpserver.observability.load_totals import LoadTotals
from moeserve.httpserver.observability.metrics import TOTALS_FILE, Metrics
from moeserve.messages.metric import HistogramCounts
from moeserve.messages.refusal import Refusal
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import Usage


def totals(directory: Path) -> LoadTotals:
    """Those of a new httpserver."""
    return LoadTotals(directory / TOTALS_FILE)


def test_a_new_httpserver_adds_nothing_to_what_the_same_router_counts(tmp_path: Path) -> None:
    first = totals(tmp_path)
    first.of(LoadReport(steps=5, prompt_tokens=50))
    first.start_again()
    first.lost(num_continued=2)
    first.of(LoadReport(steps=3, prompt_tokens=30, num_running=4))
    first.keep()
    second = totals(tmp_path)
    assert (second.newest.steps, second.newest.num_running) == (8, 0), "known before the first report"
    now = second.of(LoadReport(steps=4, prompt_tokens=30))
    assert (now.steps, now.prompt_tokens, now.engine_losses, now.continued) == (9, 80, 1, 2)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_router_that_was_lost_with_its_httpserver_is_counted(tmp_path: Path, is_told: bool) -> None:
    """is_told: the new httpserver hears of the loss before the new router's first report."""
    first = totals(tmp_path)
    first.of(LoadReport(steps=5, prompt_tokens=50))
    first.keep()
    second = totals(tmp_path)
    if is_told:
        second.start_again()
    assert second.of(LoadReport(steps=1)).steps == 6
    assert second.of(LoadReport(steps=7, prompt_tokens=1)).prompt_tokens == 51
    second.keep()
    # The same router goes on.
    assert totals(tmp_path).of(LoadReport(steps=8, prompt_tokens=1)).steps == 13


def test_a_histogram_tells_another_router_too(tmp_path: Path) -> None:
    first = totals(tmp_path)
    empty = LoadReport().decode_step_ms
    once = HistogramCounts(empty.bounds, [1, *empty.counts[1:]], 2.0)
    first.of(LoadReport(decode_step_ms=once))
    first.keep()
    assert totals(tmp_path).of(LoadReport()).decode_step_ms == once


def shown(metrics: Metrics) -> dict[str, float]:
    samples = [line.rpartition(" ") for line in metrics.render()[0].decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in samples if not name.startswith("process_")}


def count(metrics: Metrics) -> None:
    metrics.answered("POST", "/v1/completions", 200)
    metrics.refused(Refusal.QUOTA)
    metrics.tokens(3, 10.0, 9.0, None)
    metrics.finished("stop", Usage(5, 3, 0, 1.0, 2.0, 3.0), 0.5)
    metrics.batch_request("succeeded")


def test_no_sample_that_was_shown_falls(tmp_path: Path) -> None:
    first = Metrics("m", directory=tmp_path)
    count(first)
    first.reported.load = first.totals.of(LoadReport(steps=5, prompt_tokens=50))
    before = shown(first)
    counted = {
        name
        for name in before
        if name.partition("{")[0].endswith(("_total", "_bucket", "_count", "_sum")) and before[name]
    }
    assert len(counted) > 50
    assert any(name.startswith("vllm:") for name in counted)
    second = Metrics("m", directory=tmp_path)
    continued = shown(second)
    assert {name: continued[name] for name in counted} == {name: before[name] for name in counted}
    count(second)
    second.reported.load = second.totals.of(LoadReport(steps=6, prompt_tokens=50))
    after = shown(second)
    assert after['moeserve:e2e_request_latency_seconds_count{model_name="m"}'] == 2
    assert after['moeserve:engine_steps_total{model_name="m"}'] == 6
    assert shown(Metrics("m"))['moeserve:e2e_request_latency_seconds_count{model_name="m"}'] == 0


def test_a_heartbeat_keeps_what_no_scrape_has_shown(tmp_path: Path) -> None:
    first = Metrics("m", directory=tmp_path)
    count(first)
    first.totals.of(LoadReport(steps=5))
    first.keep()
    now = shown(Metrics("m", directory=tmp_path))
    assert now['moeserve:batch_requests_total{model_name="m",outcome="succeeded"}'] == 1
    assert now['moeserve:engine_steps_total{model_name="m"}'] == 5

"""The figures of a run, against ones worked out by hand from vLLM's definitions."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from array import array

import pytest

from moeserve.cli.workload.metrics import (
    Outcome,
    concurrency,
    is_good,
    parse_goodput,
    summarize,
    tokens_per_second,
)
from moeserve.cli.workload.plot import draw
from moeserve.cli.workload.report import details, failures, table
from moeserve.errors import ConfigError

# 3 tokens: at 1.2, 1.3 and 1.6 s. 1 token: at 1.5 s. A failure.
LONG = Outcome(
    sent=1.0, prompt_len=10, output_len=3, cached_tokens=4, ttft=0.2, itls=array("d", [0.1, 0.3]), latency=0.6
)
SHORT = Outcome(sent=1.1, prompt_len=20, output_len=1, ttft=0.4, latency=0.4)
FAILED = Outcome(sent=1.2, prompt_len=30, error="HTTP 503")


def test_totals_and_throughputs_leave_failures_out() -> None:
    figures = summarize([LONG, SHORT, FAILED], 2.0, [99], {})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 4)
    assert figures["total_cached_tokens"] == 4
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 2.0
    assert figures["total_token_throughput"] == 17.0
    assert figures["request_goodput"] is None


def test_latencies_and_their_percentiles() -> None:
    figures = summarize([LONG, SHORT, FAILED], 2.0, [25, 99.9], {})
    assert figures["mean_ttft_ms"] == pytest.approx(300)
    assert figures["std_ttft_ms"] == pytest.approx(100)  # of the population, as numpy has it
    assert figures["p25_ttft_ms"] == pytest.approx(250)  # between the two nearest
    assert figures["p99.9_ttft_ms"] == pytest.approx(399.8)
    assert figures["mean_tpot_ms"] == pytest.approx(200)  # (0.6 - 0.2) / 2; one token has none
    assert figures["median_itl_ms"] == pytest.approx(200)
    assert figures["mean_e2el_ms"] == pytest.approx(500)


def test_itls_are_one_population_and_tpots_are_one_a_request() -> None:
    """A long answer weighs more in ITL, not in TPOT."""
    slow = Outcome(0, 1, 2, ttft=1, itls=array("d", [1.0]), latency=2)
    fast = Outcome(0, 1, 10, ttft=1, itls=array("d", [0.1] * 9), latency=1.9)
    figures = summarize([slow, fast], 1.0, [], {})
    assert figures["mean_itl_ms"] == pytest.approx(190)
    assert figures["mean_tpot_ms"] == pytest.approx(550)


def test_peaks() -> None:
    """LONG and SHORT overlap; tokens come in the second from 1 to 2."""
    touching = Outcome(sent=1.6, prompt_len=1, output_len=1, ttft=0.5, latency=0.5)
    assert tokens_per_second([LONG, SHORT, touching]).tolist() == [0, 4, 1]
    times, counts = concurrency([LONG, SHORT, touching])
    assert times.tolist() == pytest.approx([1.0, 1.1, 1.5, 1.6, 1.6, 2.1])
    assert counts.tolist() == [1, 2, 1, 0, 1, 0], "one that begins as another ends is not beside it"
    assert summarize([LONG, SHORT], 1.0, [], {})["max_concurrent_requests"] == 2


def test_nothing_done() -> None:
    figures = summarize([FAILED], 1.0, [99], {"ttft": 1.0})
    assert figures["completed"] == figures["request_goodput"] == figures["p99_e2el_ms"] == 0


def test_goodput_counts_requests_that_keep_every_objective() -> None:
    objectives = {"ttft": 0.2, "e2el": 0.6}  # LONG is at both limits
    assert is_good(LONG, objectives)
    assert not is_good(SHORT, objectives)
    assert summarize([LONG, SHORT, FAILED], 2.0, [], objectives)["request_goodput"] == 0.5


def test_itl_objective_is_about_the_99th_percentile_of_the_requests_own_gaps() -> None:
    gaps = Outcome(0, 1, 102, ttft=0, itls=array("d", [0.01] * 100 + [1.0]), latency=2)
    assert is_good(gaps, {"itl": 0.011}), "one gap in a hundred may be long"
    gaps.itls.extend([1.0] * 3)
    assert not is_good(gaps, {"itl": 0.011})
    assert is_good(SHORT, {"itl": 0.0, "tpot": 0.0}), "one token has no gap"


def test_goodput_option_takes_spaces_and_commas() -> None:
    assert parse_goodput(["ttft:200", "itl:50,e2el:9000"]) == {"ttft": 0.2, "itl": 0.05, "e2el": 9.0}


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:", "ttft:x", "ttl:5", "ttft:-1", "ttft:nan", "ttft:inf", "", "a:b:c"]
)
def test_bad_goodput_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([text])


def test_table_has_every_figure_once() -> None:
    figures = summarize([LONG, SHORT], 2.0, [50, 99], {"ttft": 1})
    text = table(figures, "Result", [50, 99], {"More": [("Steps:", 7)]})
    lines = dict(line.split(":") for line in text.splitlines() if ":" in line)
    assert len(lines) == 13 + 4 * 4
    assert float(lines["P99 TPOT (ms)"]) == pytest.approx(figures["p99_tpot_ms"], abs=0.01)
    assert lines["Steps"].strip() == "7"


def test_details_are_parallel_lists() -> None:
    lists = details([LONG, FAILED])
    assert {len(values) for values in lists.values()} == {2}
    assert lists["itls"] == [[0.1, 0.3], []]
    assert lists["errors"] == ["", "HTTP 503"]


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4], ids="{:g}".format)
@pytest.mark.parametrize("count", [1, 2, 3000])
def test_plot_is_a_picture_of_lines_within_it(scale: float, count: int) -> None:
    outcomes = [
        Outcome(
            sent=i * scale,
            prompt_len=1,
            output_len=2 + i % 3,
            ttft=scale * (1 + i % 7),
            itls=array("d", [scale] * (1 + i % 3)),
            latency=scale * (8 + i % 3),
        )
        for i in range(count if scale < 1e3 else min(count, 2))
    ]
    svg = ET.fromstring(draw("a <title> & more", outcomes))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    assert any(text.text == "a <title> & more" for text in svg.iter() if text.tag.endswith("text"))
    lines = [line for line in svg.iter() if line.tag.endswith("polyline")]
    assert len(lines) == 6
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert 1 <= len(points) <= 1500
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert all(math.isfinite(x + y) for x, y in points)


def test_plot_of_nothing_says_so() -> None:
    assert "nothing was measured" in draw("failed", [FAILED])


def test_failures_are_counted_by_reason() -> None:
    errors = ["busy: 5 wait", "busy: 17 wait", "HTTP 400", ""]
    assert failures([Outcome(0, 1, error=error) for error in errors]) == "2 x busy: 5 wait\n1 x HTTP 400\n"

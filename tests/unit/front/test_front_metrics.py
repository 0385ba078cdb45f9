"""The front's counters, which go on where those of a lost front process ended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from moeserve.front.metrics import KEPT_FILE, FrontMetrics
from moeserve.messages.refusal import Refusal
from tests.support.front.scripted_models import Script, pool_of
from tests.support.router.virtual_time import Clock


def front(directory: Path, loads: int) -> FrontMetrics:
    """The metrics of a new front process, which has loaded a model that often."""
    pool, _ = pool_of(Clock(), 1, a=Script(), b=Script())
    pool.find("a").num_loads = loads
    return FrontMetrics(pool, directory)


def shown(metrics: FrontMetrics) -> dict[str, float]:
    text, _ = metrics.render()
    samples = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in samples}


def test_a_new_front_counts_on_from_what_the_lost_one_has_shown(tmp_path: Path) -> None:
    first = front(tmp_path, loads=3)
    first.answered("POST", "/v1/completions", 200)
    first.refused(Refusal.QUOTA)
    before = shown(first)
    second = front(tmp_path, loads=0)
    counted = {
        name: value for name, value in before.items() if "_total" in name and not name.startswith("process_")
    }
    continued = shown(second)
    assert counted == {name: continued[name] for name in counted}
    second.answered("POST", "/v1/completions", 200)
    second.answered("GET", "/v1/models", 200)
    after = shown(second)
    handler = 'moeserve:front_http_requests_total{handler="/v1/completions",method="POST",status="200"}'
    assert (before[handler], after[handler]) == (1, 2)
    assert after['moeserve:model_loads_total{model_name="a"}'] == 3
    # The third counts on from both, also where the second has counted nothing.
    assert shown(front(tmp_path, loads=1))['moeserve:model_loads_total{model_name="a"}'] == 4
    assert shown(front(tmp_path, loads=1))['moeserve:front_request_refusals_total{reason="quota"}'] == 1


def test_counts_that_no_scrape_has_shown_are_kept_with_each_heartbeat(tmp_path: Path) -> None:
    front(tmp_path, loads=2).keep()
    assert shown(front(tmp_path, loads=0))['moeserve:model_loads_total{model_name="a"}'] == 2


def test_what_is_no_counter_begins_anew(tmp_path: Path) -> None:
    first = front(tmp_path, loads=0)
    first.batch_requests_left(7)
    assert shown(first)["moeserve:front_batch_requests_left"] == 7
    assert shown(front(tmp_path, loads=0))["moeserve:front_batch_requests_left"] == 0


@pytest.mark.parametrize("content", [b"", b"[[", b'[["a", 1]]', b"\xff"])
def test_a_broken_file_is_said_and_counts_as_none(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEPT_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        metrics = front(tmp_path, loads=1)
    assert "begin at 0" in caplog.text
    assert shown(metrics)['moeserve:model_loads_total{model_name="a"}'] == 1


def test_a_file_that_cannot_be_written_costs_no_scrape_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = front(tmp_path / "gone", loads=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert shown(metrics)['moeserve:model_loads_total{model_name="a"}'] == 1
    assert caplog.text.count("begin at 0") == 1

"""Served distributions against the float32 truth and llama.cpp, through the API alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import OWN_FIXTURES, TEST_DEVICE, TINY_MODEL, wide_models
from tests.gpu.bounds import assert_near
from tests.support.measuring.accuracy import Fixture, Report, measure, table
from tests.support.servers.server import Server, running_server

# Below this distance of llama.cpp's from the truth its greedy text is a yardstick; above, its own rounding of
# activations decides steps that are not close (see tests/support/measuring/accuracy.py).
YARDSTICK_KL = 2e-4


def assert_no_worse_than_llama_cpp(report: Report) -> None:
    print(table([report]))
    if TEST_DEVICE == "cuda":
        assert_near(report.ours, report.llama_cpp)
    else:
        assert report.ours.median_kl <= report.llama_cpp.median_kl
        assert report.ours.top1 >= report.llama_cpp.top1 - 0.01
    # Two engines that are each as far from the truth as llama.cpp differ about as often as it does from the truth. Of
    # the 182 steps that are compared, 3.5% are two standard deviations. The float32 model itself has 166 of the
    # packaged fixture's alike, 3.1% fewer than llama.cpp has of the truth's choices; a GPU, nearer to it, had 165.
    allowed = 0.04 if TEST_DEVICE == "cuda" else 0.035
    assert report.same_choice >= report.llama_cpp.top1 - allowed
    if report.llama_cpp_full_kl < YARDSTICK_KL:
        assert not report.greedy_differences


def test_packaged_model(server: Server) -> None:
    fixture = Fixture.load(OWN_FIXTURES / f"{TINY_MODEL.stem}.golden.json")
    assert_no_worse_than_llama_cpp(measure(server.base_url, fixture))


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(model, id=model.stem) for model in wide_models()])
def test_wider_fixtures(model: Path) -> None:
    fixture = Fixture.load(model.with_suffix(".golden.json"))
    with running_server(model) as server:
        assert_no_worse_than_llama_cpp(measure(server.base_url, fixture))

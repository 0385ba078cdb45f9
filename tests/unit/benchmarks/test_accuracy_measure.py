"""The measure itself: what it gives for distributions whose distance is known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import OWN_FIXTURES
from tests.support.measuring.accuracy import (
    Fixture,
    agreed_length,
    distances,
    log_softmax,
    reduced_kl,
    top_of,
)


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return Fixture.load(OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.golden.json")


def test_known_distance() -> None:
    truth = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    engine = np.log(np.array([0.25, 0.5]))  # of tokens 0 and 1, which leaves 0.25 for the rest
    expected = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert reduced_kl(truth, np.array([0, 1]), engine) == pytest.approx(expected)


def test_truth_is_no_distance_from_itself(fixture: Fixture) -> None:
    truth = fixture.cases[0].truth
    same = distances(truth, top_of(truth))
    assert same.kl.max() < 1e-12
    assert same.top1 == 1.0


def test_a_shifted_distribution_is_far_away(fixture: Fixture) -> None:
    truth = fixture.cases[0].truth
    shifted = distances(truth, top_of(np.roll(truth, 1, axis=0)))
    assert shifted.median_kl > 0.1
    assert shifted.top1 < 0.5


def test_whole_vocabulary_gives_the_figure_of_the_fixture(fixture: Fixture) -> None:
    """So the golden files, the truth and the way they are read belong together."""
    kl = [np.sum(np.exp(c.truth) * (c.truth - c.llama_cpp), axis=-1) for c in fixture.cases]
    assert np.median(np.concatenate(kl)) == pytest.approx(fixture.llama_cpp_full_kl, rel=0.02)


def test_log_softmax_of_half_precision_sums_to_one() -> None:
    logits = np.array([[60000.0, 59999.0, -60000.0]], dtype=np.float16)
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1.0)


def test_greedy_comparison_stops_before_the_first_small_margin(fixture: Fixture) -> None:
    for case in fixture.cases:
        length = agreed_length(case)
        assert all(margin >= 0.05 for margin in case.margins[:length])
        assert length == len(case.greedy) or case.margins[length] < 0.05

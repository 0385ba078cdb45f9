"""Figures of `bench engine`: names that mean one thing, and what an expert cache did."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.cli.bench.engine_figures import CacheFigure, Figure, Timed, where_experts_are
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.steps import ExpertUse


def test_rates_are_of_all_tokens() -> None:
    prefill = Figure.of("prefill", 2, 50, 0, 0, Timed(0.5, 4_000_000_000), (10.0, 30.0))
    assert (prefill.tok_s, prefill.gb_s, prefill.read_gb_s) == (200.0, 8.0, 20.0)
    decode = Figure.of("decode", 2, 50, 8, 10, Timed(0.5, 1_000_000_000), (10.0, 30.0))
    assert (decode.tok_s, decode.bytes_per_token, decode.fraction) == (40.0, 50_000_000, 0.1)


def test_what_warms_up_has_a_name_of_its_own() -> None:
    """So has a decode behind it: a name means the same in every file."""
    parts = (("prefill", 0, 0), ("warm-up", 0, 8), ("decode", 8, 10), ("decode", 0, 10))
    figures = [Figure.of(phase, 2, 50, first, gen, Timed(0.5, 0), (1.0, 1.0)) for phase, first, gen in parts]
    assert [figure.measured.name for figure in figures] == [
        "prefill, batch 2, prompt 50",
        "warm-up, batch 2, prompt 50, gen 8",
        "decode, batch 2, prompt 50, warm-up 8, gen 10",
        "decode, batch 2, prompt 50, gen 10",
    ]


def test_what_the_cache_did_is_of_a_step() -> None:
    before, now = ExpertCacheCounts(100, 50, 10, 0), ExpertCacheCounts(190, 60, 30, 0)
    cache = CacheFigure.between(before, now, 10)
    assert cache == CacheFigure(hit_rate=0.9, promotions=2.0)
    assert CacheFigure.between(None, None, 10) is None
    figure = Figure.of("decode", 1, 50, 64, 10, Timed(0.5, 0, cache), (1.0, 1.0))
    assert figure.row.endswith("(1.0 GB/s), 90% of experts found on the GPU")
    without = Figure.of("decode", 1, 50, 64, 10, Timed(0.5, 0), (1.0, 1.0))
    assert without.row.endswith("(1.0 GB/s)")


@pytest.mark.parametrize(
    ("on_gpu", "text"),
    [
        ([0, 0, 0], ""),
        ([4, 4, 4], ""),
        ([2, 2, 2], ", 2 of a layer's 4 experts on the GPU"),
        ([0, 2, 3], ", 2 to 3 of a layer's 4 experts on the GPU"),  # a layer without experts, or all in RAM
    ],
)
def test_where_experts_are(on_gpu: list[int], text: str) -> None:
    places = np.array([[1] * count + [0] * (4 - count) for count in on_gpu], np.uint8)
    use = ExpertUse(3, 4, 2, np.zeros((3, 4), np.int64).tobytes(), places.tobytes())
    assert where_experts_are(use) == text

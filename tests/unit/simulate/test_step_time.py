"""The step-time model: what it computes, that a fit finds it again, and what a file may not hold."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moeserve.cli.simulate.command import default_step_time
from moeserve.cli.simulate.fit import StepSample, fit, relative_errors
from moeserve.cli.simulate.step_time import (
    StepLoad,
    StepTime,
    StepTimeError,
    load_of,
    read_step_time,
    write_step_time,
)
from moeserve.messages.steps import Row, StepPlan

MODEL = StepTime(
    "by hand",
    tokens=[1, 4, 16, 64],
    seconds=[0.010, 0.016, 0.020, 0.068],
    decode_context=2e-6,
    prefill_pairs=3e-8,
    sampled_row=1e-4,
    prompt=5e-3,
    prompt_span=1e-6,
    decode_span=3e-6,
    sampling=2e-3,
)


def rows(*shapes: tuple[int, int, bool]) -> StepPlan:
    """A plan of rows (start, count, sample)."""
    return StepPlan(
        1, [], [Row(i, start, count, b"", sample) for i, (start, count, sample) in enumerate(shapes)]
    )


def test_load_of_a_plan() -> None:
    """Two decode rows at positions 9 and 99; positions 10, 11 and 12 of a prompt read 11 + 12 + 13."""
    plan = rows((9, 1, True), (99, 1, True), (10, 3, False))
    assert load_of(plan) == StepLoad(
        5, 110, prefill_pairs=36, sampled_rows=2, has_prompt=1, prompt_span=13, decode_rows=2, decode_span=100
    )
    assert load_of(rows((9, 1, True))) == StepLoad(
        1, 10, prefill_pairs=0, sampled_rows=1, decode_rows=1, decode_span=10
    )


@pytest.mark.parametrize(
    ("tokens", "ms"), [(1, 10), (2, 12), (4, 16), (10, 18), (16, 20), (64, 68), (128, 132), (0, 8)]
)
def test_base_is_a_line_through_its_points_and_on(tokens: int, ms: float) -> None:
    assert MODEL.base(tokens) == pytest.approx(ms / 1e3)


def test_all_terms_add_up() -> None:
    decode = 0.016 + 0.002 + 0.00006 + 0.0003 + 0.002
    assert MODEL.of(StepLoad(4, 1000, 2000, 3)) == pytest.approx(decode)
    assert MODEL.of(StepLoad(4, 1000, 2000, 3, 1, 700)) == pytest.approx(decode + 0.005 + 0.0007)
    assert MODEL.of(StepLoad(4, 1000, 2000, 3, decode_span=600)) == pytest.approx(decode + 0.0018)


def random_loads(count: int, seed: int) -> list[StepLoad]:
    random = np.random.default_rng(seed)
    draw = random.integers
    return [
        StepLoad(
            int(size),
            int(draw(0, 8000)),
            int(draw(0, 200_000)),
            int(draw(0, size + 1)),
            has_prompt := int(draw(0, 2)),
            has_prompt * int(draw(0, 5000)),
            decode_span=int(draw(0, 4000)),
        )
        for size in random.choice(MODEL.tokens, count)
    ]


def test_fit_finds_the_model_in_its_own_steps() -> None:
    samples = [StepSample(load, MODEL.of(load)) for load in random_loads(200, 0)]
    found = fit(samples, "fit")
    assert found.tokens == MODEL.tokens
    assert found.seconds == pytest.approx(MODEL.seconds, rel=1e-3)
    assert found.decode_context == pytest.approx(MODEL.decode_context, rel=1e-3)
    assert found.prefill_pairs == pytest.approx(MODEL.prefill_pairs, rel=1e-3)
    assert found.sampled_row == pytest.approx(MODEL.sampled_row, rel=1e-2)
    assert found.prompt == pytest.approx(MODEL.prompt, rel=1e-2)
    assert found.prompt_span == pytest.approx(MODEL.prompt_span, rel=1e-2)
    assert found.sampling == pytest.approx(MODEL.sampling, rel=1e-2)
    assert found.decode_span == pytest.approx(MODEL.decode_span, rel=1e-2)


def test_steps_of_decode_rows_alone_have_times_of_their_own() -> None:
    """As a GPU's, whose decode rows cost an eighth of sampling behind a prompt. Many steps are short prompts."""
    short = [StepSample(load_of(rows((0, 16, True))), 0.00656) for _ in range(200)]
    chunks = [StepSample(load_of(rows((0, n, False))), 0.006 + n * 1e-5) for n in (64, 512, 8192)]
    batches = {n: load_of(rows(*[(99, 1, True)] * n)) for n in (1, 8, 64, 256)}
    decoding = [StepSample(load, 0.002 + n * 5e-5) for n, load in batches.items()]
    beside = [
        StepSample(load_of(rows(*[(99, 1, True)] * 8, (50, n, False))), 0.009 + n * 1e-5) for n in (32, 120)
    ]
    found = fit([*short, *chunks, *decoding, *beside], "fit")
    assert found.decode_rows == [1, 8, 64, 256]
    for n, load in batches.items():
        assert found.of(load) == pytest.approx(0.002 + n * 5e-5, rel=0.02)
    assert found.of(load_of(rows((0, 512, False)))) == pytest.approx(0.006 + 512e-5, rel=0.05)


def test_fit_bears_noise_and_interrupted_steps() -> None:
    """5% of noise, and every tenth step takes three times as long: the rest is still met within 4%."""
    random = np.random.default_rng(1)
    loads = random_loads(400, 2)
    noisy = [
        StepSample(load, MODEL.of(load) * (random.normal(1, 0.05) if i % 10 else 3.0))
        for i, load in enumerate(loads)
    ]
    found = fit(noisy, "fit")
    true = [StepSample(load, MODEL.of(load)) for load in random_loads(100, 3)]
    assert np.abs(relative_errors(found, true)).max() < 0.04


def test_fit_is_never_negative_and_never_descends() -> None:
    random = np.random.default_rng(4)
    samples = [StepSample(load, random.uniform(0.001, 0.1)) for load in random_loads(60, 5)]
    found = fit(samples, "noise alone")
    assert (
        min(*found.seconds, found.decode_context, found.decode_span, found.prefill_pairs, found.sampled_row)
        >= 0
    )
    assert min(found.prompt, found.prompt_span) >= 0
    assert all(a <= b for a, b in pairwise(found.seconds))


def test_one_size_is_not_enough() -> None:
    with pytest.raises(ValueError, match="two different sizes"):
        fit([StepSample(StepLoad(4, 1, 1, 1), 0.1)] * 3, "x")


def test_written_and_read_it_is_the_same(tmp_path: Path) -> None:
    write_step_time(tmp_path / "m.json", MODEL)
    assert read_step_time(tmp_path / "m.json") == MODEL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 1]}, "ascend"),
        ({"tokens": [1, 2, 3]}, "same length"),
        ({"seconds": [0.2, 0.1]}, "descend"),
        ({"seconds": [-0.1, 0.1]}, ">= 0"),
        ({"tokens": [1], "seconds": [1]}, "length >= 2"),
        ({"decode_rows": [1, 2], "decode_seconds": [0.1]}, "same length"),
        ({"decode_rows": [2, 1], "decode_seconds": [0.1, 0.2]}, "`decode_rows` must ascend"),
        ({"decode_context": -1}, ">= 0"),
        ({"decode_contxt": 1}, "unknown field"),
        ({"launch": -1}, ">= 0"),
        ({"measured_steps": [[0, 0, 0, -16, 1.0]]}, "must not be negative"),
        ({"source": None}, "source"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"source": "x", "tokens": [1, 2], "seconds": [0.1, 0.2]} | change))
    with pytest.raises(StepTimeError, match=message) as error:
        read_step_time(path)
    assert str(path) in str(error.value)


def test_the_packaged_model_is_one() -> None:
    model = read_step_time(default_step_time())
    assert 0.005 < model.base(1) < model.base(64) < model.base(512)

"""A thousandth of what `python -m tests.fuzz.models` does: hostile model files end in a clear error or are served."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from moeserve.models.errors import ModelError
from tests.fuzz.models import run_case, use_model, write_case

CASES = 60


@pytest.mark.parametrize("seed", [20_000_000, 30_000_000])
def test_hostile_models_end_in_a_clear_error_or_are_served(seed: int) -> None:
    problems = {case: run_case(case) for case in range(seed, seed + CASES)}
    assert {case: problem for case, problem in problems.items() if problem} == {}


def test_the_cases_are_neither_all_refused_nor_all_served() -> None:
    served = 0
    for seed in range(30):
        with tempfile.TemporaryDirectory() as folder:
            try:
                use_model(write_case(Path(folder), seed))
                served += 1
            except ModelError:
                continue
    assert 4 < served < 26

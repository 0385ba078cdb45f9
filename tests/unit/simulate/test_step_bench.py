"""`bench steps` and its fit, on a worker whose steps take what a formula says: a GPU's, by an H100's times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeserve.bench.steps import StepBench
from moeserve.messages.steps import StepPlan
from moeserve.simulate.fit import fit, relative_errors
from moeserve.simulate.step_time import StepLoad, load_of

DECODE = ([1, 8, 64, 128, 256], [1.7, 4.9, 12.4, 15.0, 22.0])  # rows, milliseconds
PROMPTS = ([16, 64, 256, 512, 1024, 8192], [6.8, 9.0, 16.1, 25.8, 42.6, 210.0])  # tokens


def milliseconds(load: StepLoad) -> float:
    kinds = DECODE if load.is_decode else PROMPTS
    rows = (
        0.0 if load.is_decode or load.decode_context == 0 else 7.0
    )  # beside prompts they read weights of their own
    attention = 54e-6 * load.decode_context + 3.2e-6 * load.prefill_pairs + 2e-4 * load.prompt_span
    return float(np.interp(load.tokens, *kinds)) + rows + attention


@dataclass
class Finished:
    compute_ms: float


@dataclass
class Ready:
    vocab_size: int = 1000
    num_window_slots: int = 0
    window: int = 0


class FormulaWorker:
    """The first steps of 8 and of 16 tokens take 35 ms more."""

    def __init__(self) -> None:
        self._late = {8, 16}
        self._is_first = True  # no sample

    def ready(self) -> Ready:
        return Ready()

    def step(self, plan: StepPlan) -> Finished:
        load = load_of(plan)
        is_late = not self._is_first and load.tokens in self._late
        self._is_first = False
        self._late -= {load.tokens} if is_late else set()
        return Finished(milliseconds(load) + 35.0 * is_late)


def test_the_fit_is_near_the_steps_of_a_gpu() -> None:
    """255 short prompts that are alike, chunks up to 8,192 tokens, decode steps that cost nothing of the kind."""
    bench = StepBench(FormulaWorker(), 256, 8192, 32_000)  # type: ignore[arg-type]
    bench.measure()
    errors = abs(relative_errors(fit(bench.samples, "a formula"), bench.samples))
    assert np.median(errors) < 0.02
    assert np.percentile(errors, 90) < 0.15

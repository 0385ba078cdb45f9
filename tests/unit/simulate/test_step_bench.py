"""`bench steps` and its fit, on a worker whose steps take what a formula says: a GPU's, by an H100's times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from moeserve.cli.bench.steps import StepBench
from moeserve.cli.simulate.fit import fit, relative_errors
from moeserve.cli.simulate.step_time import StepLoad, load_of
from moeserve.messages.slot_kinds import SlotKind
from moeserve.messages.steps import Row, StepPlan

DECODE = ([1, 8, 64, 128, 256], [1.7, 4.9, 12.4, 15.0, 22.0])  # rows, milliseconds
PROMPTS = ([16, 64, 256, 512, 1024, 8192], [6.8, 9.0, 16.1, 25.8, 42.6, 210.0])  # tokens


def milliseconds(load: StepLoad) -> float:
    """A step's time. Rows beside prompts take 90% of what both take alone. Prompts that end share what it costs to
    sample."""
    rows, prompts = load.tokens if load.is_decode else load.decode_rows, load.without_rows.tokens
    alone = float(np.interp(rows, *DECODE)) if rows else 0.0
    if not load.is_decode:
        sampling = 0.24 * min(load.without_rows.sampled_rows, 1)
        alone = (alone + float(np.interp(prompts, *PROMPTS)) + sampling) * (0.9 if rows else 1.0)
    contexts = 28e-6 * load.decode_context + 26e-6 * load.decode_span
    return alone + contexts + 3.2e-6 * load.prefill_pairs + 2e-4 * load.prompt_span


@dataclass
class Finished:
    compute_ms: float


@dataclass
class Ready:
    vocab_size: int = 1000
    num_window_slots: int = 0
    window: int = 0
    kv_slot_kinds: tuple[SlotKind, ...] = ()


class FormulaWorker:
    """The first steps of 8 and of 16 tokens take 35 ms more."""

    runs_ahead = False

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
    model = fit(bench.samples, "a formula")
    assert model.adds_rows
    errors = abs(relative_errors(model, bench.samples))
    assert np.median(errors) < 0.02
    assert np.percentile(errors, 90) < 0.12
    # What no measured step is like, as servers have it: rows that are all far into their answers, and one that is.
    for far in (16 * [8000], [32_000], 64 * [400]):
        load = load_of(StepPlan(1, [], [Row(0, start, 1, b"", True) for start in far]))
        assert model.of(load) * 1e3 == pytest.approx(milliseconds(load), rel=0.05)
    together = [sample.load for sample in bench.samples if sample.load.prompt_span == 256]
    assert {load.sampled_rows for load in together if not load.decode_rows} >= {2, 4, 8, 16, 32}
    for prompts, tokens in ((32, 256), (1, 16)):
        load = load_of(StepPlan(1, [], [Row(0, 0, tokens, b"", True)] * prompts))
        assert model.of(load) * 1e3 == pytest.approx(milliseconds(load), rel=0.02)


class Ahead(FormulaWorker):
    """A step is 0.2 ms shorter that was launched behind another."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self._late = set()
        self._under_way: Finished | None = None

    def step(self, plan: StepPlan) -> Finished:
        assert self._under_way is None
        return super().step(plan)

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    def may_follow(self, plan: StepPlan) -> bool:
        return not plan.new_seqs

    def start(self, plan: StepPlan) -> None:
        self._under_way = self.step(plan)

    def advance(self, plan: StepPlan) -> Finished:
        finished = self.finish()
        self._under_way = Finished(super().step(plan).compute_ms - 0.2)
        return finished

    def launch_rest(self) -> None:
        assert self._under_way is not None

    def finish(self) -> Finished:
        finished, self._under_way = self._under_way, None
        assert finished is not None
        return finished


def test_decode_steps_are_launched_ahead_as_a_server_launches_them() -> None:
    bench = StepBench(Ahead(), 64, 1024, 8_192)  # type: ignore[arg-type]
    bench.measure()
    assert bench.launch_s == pytest.approx(0.2e-3, rel=0.05)
    model = fit(bench.samples, "a formula")
    one = load_of(StepPlan(1, [], [Row(0, 40, 1, b"", True)]))
    assert model.of(one) * 1e3 == pytest.approx(milliseconds(one) - 0.2, rel=0.01)


class OneKernel(FormulaWorker):
    """As a CPU: a row is a token, and beside a prompt it reads no weights that the prompt does not read."""

    def step(self, plan: StepPlan) -> Finished:
        load = load_of(plan)
        return Finished(30.0 + 4.0 * load.tokens + 1e-3 * load.decode_context + 1e-4 * load.prefill_pairs)


def test_rows_beside_prompts_are_tokens_where_that_is_nearer() -> None:
    bench = StepBench(OneKernel(), 16, 512, 4096)  # type: ignore[arg-type]
    bench.measure()
    model = fit(bench.samples, "a formula")
    assert not model.adds_rows
    assert abs(relative_errors(model, bench.samples)).max() < 0.01

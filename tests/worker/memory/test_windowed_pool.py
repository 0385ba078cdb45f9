"""A windowed model on the CPU engine with a KV pool of its own for windowed layers: the same bits as with one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from gguf.constants import GGMLQuantizationType as Type

from moeserve.cli.bench.engine import EngineBench
from moeserve.cli.bench.plans_in_turn import run_in_turn
from moeserve.cli.bench.steps import StepBench
from moeserve.messages.steps import StepPlan, StepResult
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.runner import Runner
from tests.gpu.driver import small_config
from tests.support.models.gemma_file import WINDOW, write_gemma
from tests.support.worker.windowed_requests import talk


def runner_of(model: Path, ratio: float, kv_dtype: str) -> Runner:
    config = small_config(
        model, threads=2, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, max_total_tokens=160,
        kv_window_ratio=ratio, kv_cache_dtype=kv_dtype,
    )  # fmt: skip
    return load_cpu_runner(config, lambda *_: None)


def test_the_same_bits_as_with_one_pool(tmp_path: Path) -> None:
    model = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    for kv_dtype in ("f16", "q8_0"):
        one, two = (runner_of(model, ratio, kv_dtype) for ratio in (0.0, 0.2))
        assert (one.ready().num_window_slots, one.ready().window) == (0, 0)
        assert (two.ready().num_window_slots, two.ready().window) == (2 * WINDOW + 2 * 16, WINDOW)
        assert two.ready().kv_bytes < one.ready().kv_bytes
        _, expected = talk(one)
        scheduler, found = talk(two)
        assert found == expected
        assert [len(answer) for answer in found.values()] == [12, 20, 8, 12, 14, 14]
        report = scheduler.load_report()
        assert report.window_hits >= 2
        assert report.window_slots_used == 0


class Noted(EngineBench):
    """Keeps what its steps gave."""

    def __init__(self, runner: Runner, step_tokens: int) -> None:
        super().__init__(runner, step_tokens)
        self.results: list[StepResult] = []

    def run_all(self, plans: Iterable[StepPlan]) -> None:
        self.results += [answered.result for answered in run_in_turn(self._runner, plans)]


def test_benches_hand_out_window_slots(tmp_path: Path) -> None:
    """Twice, so that they come back; the same log-probabilities as of one pool."""
    model = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    found = []
    for ratio in (0.0, 0.2):
        runner = runner_of(model, ratio, "f16")
        bench = Noted(runner, 16)
        for _ in range(2):
            bench.prefill(2, 40)
            bench.decode(2, 40, 20)
        tokens = [one.token_id for result in bench.results for one in result.sampled]
        assert min(tokens) >= 0
        found.append(tokens)
        steps = StepBench(runner, 2, 16, 40)
        steps.measure()
        assert all(math.isfinite(sample.seconds) for sample in steps.samples)
    assert len(found[0]) == 2 * (2 + 2 * 20)
    assert found[0] == found[1]

"""The constants of `moeserve plan`'s GPU speed that fit what was measured, for moeserve/cli/plan/gpu_constants.py.

`python -m benchmarks.plan_accuracy --fit` prints them. It needs no GPU. The sum of squared logarithms of predicted over
measured is made small by changing one constant after another by smaller and smaller factors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeserve.cli.plan.gpu_constants import H200, GpuConstants
from moeserve.cli.plan.rates import CpuRates, GpuRates
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.cli.plan.speed import HybridSpeed
from moeserve.kv.layout import KvLayout
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_shape
from moeserve.placement import LayerPlacement, ModelSizes, Placement

FACTORS = (2.0, 1.4, 1.2, 1.1, 1.05, 1.02, 1.01)
ROUNDS = 20  # of all constants, with each factor
MOST_SHARE = 1.0


class Run:
    """One measured placement."""

    def __init__(self, record: dict[str, Any], model_file: Path | None) -> None:
        gguf = open_metadata(model_file or Path(record["model"]))
        self._model = read_shape(gguf)
        self._sizes = ModelSizes.of(gguf.tensors, KvLayout(self._model))
        self._routing = RoutingProbabilities(self._model, record["heat"])
        layers = tuple(
            LayerPlacement("cuda", self._model.num_experts, tuple(experts), prefill)
            for experts, prefill in zip(record["gpu_experts"], record["prefill"], strict=True)
        )
        self._placement = Placement("cuda", layers, "cuda", 0, 0)
        self._rates = CpuRates(**record["cpu"]), GpuRates(**record["gpu"])
        self._step_tokens, self._context = record["step_tokens"], record["context"]
        self.measured: dict[str, float] = record["measured"]
        self.name = f"{len(record['gpu_experts'][0])} experts on the GPU"

    def ratios(self, constants: GpuConstants) -> dict[str, float]:
        """Predicted over measured."""
        speed = HybridSpeed(self._model, self._sizes, self._routing, self._placement, *self._rates, constants)

        def predicted(name: str) -> float:
            phase, number = name.split()
            if phase == "prefill":
                return speed.prefill(int(number), self._step_tokens)
            return speed.decode(int(number), self._context)

        return {name: predicted(name) / rate for name, rate in self.measured.items()}


def fit(error: Callable[[GpuConstants], float], start: GpuConstants) -> GpuConstants:
    best, least = start, error(start)
    names = [field.name for field in dataclasses.fields(GpuConstants)]
    for factor in FACTORS:
        for _ in range(ROUNDS):
            before = least
            for name in names:
                for way in (factor, 1 / factor):
                    value = getattr(best, name) * way
                    if not name.endswith("_s") and value > MOST_SHARE:
                        continue
                    tried = dataclasses.replace(best, **{name: value})
                    if (found := error(tried)) < least:
                        best, least = tried, found
            if least == before:
                break
    return best


def print_fit(file: Path, model: Path | None) -> None:
    """file: JSON lines of `plan_accuracy --save`. model: the measured file's header, where it lies elsewhere now."""
    runs = [Run(json.loads(line), model) for line in file.read_text().splitlines()]

    def error(constants: GpuConstants) -> float:
        return sum(math.log(ratio) ** 2 for run in runs for ratio in run.ratios(constants).values())

    found = fit(error, H200)
    for run in runs:
        before, after = run.ratios(H200), run.ratios(found)
        print(run.name)
        for name in before:
            print(f"  {name:<14} {run.measured[name]:>10.1f} tok/s  {before[name]:.2f} -> {after[name]:.2f}")
    for name, value in dataclasses.asdict(found).items():
        print(f"{name}: {value:.3g}")

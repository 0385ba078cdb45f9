"""Counts the bytes of weights that a step reads."""

from __future__ import annotations

from moeserve.messages.steps import StepPlan
from moeserve.worker.runner import Runner


def step_bytes(runner: Runner, plan: StepPlan) -> int:
    """Runs one plan and returns the bytes of weights that it read; see `Engine.weight_bytes_since`."""
    before = runner.engine.weight_counters()
    runner.step(plan)
    return runner.engine.weight_bytes_since(before)

"""How many bytes of weights a step reads."""

from __future__ import annotations

from moeserve.messages.steps import StepPlan
from moeserve.worker.runner import Runner


def step_bytes(runner: Runner, plan: StepPlan) -> int:
    """Runs one plan and counts them; see `Engine.weight_bytes_since`."""
    before = runner.engine.weight_counters()
    runner.step(plan)
    return runner.engine.weight_bytes_since(before)

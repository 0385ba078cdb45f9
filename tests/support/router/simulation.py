"""`moeserve simulate` in this process."""

from __future__ import annotations

from typing import Any

from moeserve.cli.simulate.simulation import Simulation, SimulationResult
from moeserve.cli.simulate.step_time import StepTime
from moeserve.cli.simulate.worker import Timing
from moeserve.cli.workload.trace import Session, Turn, Workload
from moeserve.router.core.limits import Limits

TEN_MS = StepTime("ten milliseconds a step", [0, 1], [0.010, 0.010])

NOTHING_ELSE = Timing(frontend=0, reply=0, hop=0, gap=0)


def limits(**changes: Any) -> Limits:
    usual: dict[str, Any] = {
        "num_kv_slots": 20_000,
        "max_num_seqs": 32,
        "max_model_len": 8_000,
        "max_num_batched_tokens": 256,
        "max_num_queued_reqs": 2048,
    }
    return Limits(**(usual | changes))


def single(*requests: tuple[float, int, int]) -> Workload:
    """Requests (arrival, prompt tokens, output tokens)."""
    return Workload(tuple(Session((Turn(prompt, output, at),)) for at, prompt, output in requests))


def simulate(
    workload: Workload,
    step_time: StepTime = TEN_MS,
    timing: Timing = NOTHING_ELSE,
    max_concurrency: int | None = None,
    max_tokens: int | None = None,
    **changes: int,
) -> SimulationResult:
    return Simulation(workload, limits(**changes), step_time, timing, max_concurrency, max_tokens).run()


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)

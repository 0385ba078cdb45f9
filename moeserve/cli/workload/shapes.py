"""Synthetic workloads: one shape with a few parameters, and the presets and cases that `--dataset-name` names.

All presets are values of the same parameters: a single request is a session of one turn; sessions of a group share a
prefix; every n-th request may be long. `options.py` refuses parameters that have no effect without another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.cli.workload.trace import Session, Turn, Workload


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Lengths are tokens. Field names are those of the options (`input_len` is `--input-len`)."""

    input_len: int = 1024  # new tokens per request, after the prefix or the history
    output_len: int = 128
    range_ratio: float = (
        0.0  # both lengths are drawn uniformly from length x (1 - ratio) .. length x (1 + ratio)
    )
    prefix_len: int = 0  # tokens with which all sessions of a group begin
    num_prefixes: int = 1  # number of groups; sessions are assigned in rotation
    num_turns: int = 1  # requests per session: each continues the previous one
    think_time: float = 0.0  # mean seconds between an answer and the next turn, exponential
    long_input_len: int = 16000
    long_every: int = 0  # every long_every-th request has long_input_len new tokens; 0: none


WITH_PICTURES: Final = "random-mm"  # vLLM's name; `bench/pictures.py` makes the pictures
PRESETS: dict[str, WorkloadShape] = {
    "random": WorkloadShape(),
    WITH_PICTURES: WorkloadShape(),
    # vLLM's prefix_repetition.
    "shared-prefix": WorkloadShape(input_len=256, prefix_len=256, num_prefixes=10),
    "multi-turn": WorkloadShape(input_len=128, prefix_len=1000, num_turns=10),
    "long-among-short": WorkloadShape(input_len=256, long_every=16),
}


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """A load for comparing servers and versions: all requests at once, unless a rate is given."""

    shape: WorkloadShape
    num_prompts: int


CASES: dict[str, BenchmarkCase] = {
    "64-clients": BenchmarkCase(WorkloadShape(input_len=256, output_len=256), 64),
    "256-clients": BenchmarkCase(WorkloadShape(input_len=256, output_len=256), 256),
    "16-long-prompts": BenchmarkCase(WorkloadShape(input_len=8000, output_len=128), 16),
    "one-long-prompt": BenchmarkCase(WorkloadShape(input_len=32_000, output_len=16), 1),
}
# The names that --dataset-name takes.
DATASETS: dict[str, WorkloadShape] = PRESETS | {name: case.shape for name, case in CASES.items()}


def generate(shape: WorkloadShape, num_requests: int, rate: float, burstiness: float, seed: int) -> Workload:
    """Returns a workload of `num_requests` requests in sessions that arrive at `rate` per second (see `arrival_times`).
    The last session is shorter if the number requires it. The same seed gives the same workload."""
    rng = np.random.default_rng(seed)
    num_sessions = math.ceil(num_requests / shape.num_turns)
    arrivals = arrival_times(num_sessions, rate, burstiness, rng)
    inputs = _lengths(shape.input_len, shape.range_ratio, num_requests, rng)
    if shape.long_every:
        inputs[shape.long_every - 1 :: shape.long_every] = shape.long_input_len
    outputs = _lengths(shape.output_len, shape.range_ratio, num_requests, rng)
    thinks = rng.exponential(shape.think_time, num_requests) if shape.think_time else np.zeros(num_requests)
    sessions: list[Session] = []
    for number, arrival in enumerate(arrivals):
        first = number * shape.num_turns
        turns = tuple(
            Turn(
                input_len=int(inputs[place]),
                output_len=int(outputs[place]),
                not_before=float(arrival) if place == first else 0.0,
                think=0.0 if place == first else float(thinks[place]),
            )
            for place in range(first, min(first + shape.num_turns, num_requests))
        )
        sessions.append(Session(turns, number % shape.num_prefixes, shape.prefix_len))
    return Workload(tuple(sessions), seed)


def arrival_times(
    count: int, rate: float, burstiness: float, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Returns the seconds from the start, float64 [count].

    The gaps are gamma-distributed with mean 1 / rate and shape `burstiness`: 1 is a Poisson process, lower values come
    in bursts, higher ones are more regular; an infinite rate means all at once. As in `vllm bench serve`, they are
    scaled so that the last request comes at exactly count / rate: runs with different seeds have the same load.
    """
    if math.isinf(rate):
        return np.zeros(count)
    times = np.cumsum(rng.gamma(burstiness, 1.0 / (rate * burstiness), count))
    scaled: npt.NDArray[np.float64] = times * (count / rate / times[-1])
    return scaled


def _lengths(mean: int, ratio: float, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draws lengths uniformly, both ends included, at least 1."""
    low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
    return rng.integers(max(low, 1), max(high, 1) + 1, count)

"""Two ends of the processes' channel."""

from __future__ import annotations

import select
import time
from array import array
from pathlib import Path

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan, StepResult
from moeserve.messages.worker import WorkerAnswer, WorkerClient
from moeserve.router.worker_client import RpycWorker
from tests.support.servers.rpc_child import (
    ANSWER,
)


def plan(step: int, behaviour: int = ANSWER, prompt: int = 4) -> StepPlan:
    tokens = array("i", [step, behaviour, *range(2, prompt)])
    new = NewSeq(0, tokens.tobytes(), prompt, b"", SamplingParams(max_tokens=3))
    return StepPlan(step, [new], [Row(0, 0, prompt, array("i", range(prompt)).tobytes(), True)])


def answers_of(worker: WorkerClient, count: int, timeout: float = 60.0) -> list[WorkerAnswer]:
    """Waits as the router does: on the file descriptor, unless something was read ahead."""
    got: list[WorkerAnswer] = []
    deadline = time.monotonic() + timeout
    while len(got) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"{len(got)} of {count} results came"
        if not worker.has_read_ahead:
            select.select([worker.fileno()], [], [], left)
        got += worker.poll()
    return got


def results(worker: WorkerClient, count: int, timeout: float = 60.0) -> list[StepResult]:
    answers = answers_of(worker, count, timeout)
    steps = [answer for answer in answers if isinstance(answer, StepResult)]
    assert len(steps) == len(answers)
    return steps


def connected(path: Path) -> RpycWorker:
    """To a worker that another router has left. Its socket has a file a moment before it listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return RpycWorker(path)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)

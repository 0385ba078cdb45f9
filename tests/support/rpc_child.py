"""A worker process without a model: `python -m tests.support.rpc_child SOCKET`, served by the real service.

The prompt's second token says what its steps do: 0 answer at once, 1 raise, 2 take 0.2 s, 3 answer with
prompt logprobs of several megabytes, 4 panic as Rust code does. With "overlapping", steps take 50 ms on a device of its
own, one after another, and plans without new sequences are launched ahead; with "seen" too, all but their rest.
"""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import ExpertUse, Sampled, StepPlan, StepResult, WorkerReady
from moeserve.messages.worker import OverlappingWorker, Worker
from moeserve.worker.service import serve

REPOSITORY = Path(__file__).parents[2]

READY = WorkerReady(
    num_kv_slots=256,
    max_num_seqs=4,
    max_model_len=128,
    vocab_size=1000,
    weight_bytes=1,
    kv_bytes=2,
    device="none",
)
EXPERT_USE = ExpertUse(1, 2, 1, array("q", [3, 4]).tobytes(), bytes([0, 1]))
ANSWER, RAISE, SLEEP, FLOOD, PANIC = range(5)
DEVICE_S = 0.05


class PanicException(BaseException):
    """PyO3 makes one of a panic in Rust; it is no Exception."""


class ScriptedRunner(Worker):
    def __init__(self) -> None:
        self.behaviour: dict[int, int] = {}  # by request slot

    def ready(self) -> WorkerReady:
        return READY

    def expert_use(self) -> ExpertUse:
        return EXPERT_USE

    def step(self, plan: StepPlan) -> StepResult:
        for new in plan.new_seqs:
            tokens = array("i", new.token_ids)
            self.behaviour[new.req_slot] = tokens[1] if len(tokens) > 1 else ANSWER
        kinds = {self.behaviour[row.req_slot] for row in plan.rows}
        if RAISE in kinds:
            raise FloatingPointError("the model is on fire")
        if PANIC in kinds:
            raise PanicException("index out of bounds")
        if SLEEP in kinds:
            time.sleep(0.2)
        sampled = [Sampled(100 + row.start) for row in plan.rows if row.sample]
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        if FLOOD in kinds:
            prompt_logprobs[0] = [
                TokenLogprob(i, -1.0, 1, tuple(range(20)), (-1.0,) * 20) for i in range(20_000)
            ]
        return StepResult(plan.step, sampled, prompt_logprobs, 1.0, 0.0)


class OverlappingRunner(ScriptedRunner, OverlappingWorker):
    """A result's compute_ms is the number of the step that was launched last."""

    runs_ahead = True

    def __init__(self, seen: Path | None = None) -> None:
        """seen: SEEN.N says that the result of step N has been."""
        super().__init__()
        self._seen = seen
        self._under_way: tuple[StepPlan, float] | None = None
        self._has_rest = False
        self._launched = 0
        self._device_is_free = 0.0  # from then on

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self._launched = plan.step
        self._device_is_free = max(self._device_is_free, time.monotonic()) + DEVICE_S
        return plan, self._device_is_free

    def start(self, plan: StepPlan) -> None:
        assert self._under_way is None
        self._under_way = self._launch(plan)

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def is_computed(self) -> bool:
        assert self._under_way is not None
        assert not self._has_rest
        return time.monotonic() >= self._under_way[1]

    def may_follow(self, plan: StepPlan) -> bool:
        return not plan.new_seqs

    def advance(self, plan: StepPlan) -> StepResult:
        launched = self._launch(plan)
        result = self.finish()
        self._under_way, self._has_rest = launched, True
        return result

    def launch_rest(self) -> None:
        """Of a plan that was launched ahead, waits for the file that says the result before has been seen."""
        if self._has_rest and self._seen is not None:
            seen = self._seen.with_suffix(f".{self._launched - 1}")
            while not seen.exists():
                time.sleep(0.001)
        self._has_rest = False

    def finish(self) -> StepResult:
        assert self._under_way is not None
        assert not self._has_rest
        (plan, end), self._under_way = self._under_way, None
        time.sleep(max(0.0, end - time.monotonic()))
        return msgspec.structs.replace(self.step(plan), compute_ms=float(self._launched))

    def expert_use(self) -> ExpertUse:
        assert self._under_way is None
        return EXPERT_USE


def runner_of(options: list[str], path: Path) -> ScriptedRunner:
    if "overlapping" not in options:
        return ScriptedRunner()
    return OverlappingRunner(path if "seen" in options else None)


@contextmanager
def child_process(path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A scripted worker that listens at `path`; with "outlives routers" one that no router ends."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.rpc_child", str(path), *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "listening\n", child.communicate(timeout=5)
        yield child
    finally:
        child.kill()
        child.communicate()


if __name__ == "__main__":
    serve(
        runner_of(sys.argv[2:], Path(sys.argv[1])),
        Path(sys.argv[1]),
        lambda: print("listening", flush=True),
        lambda: None,
        outlives_routers="outlives routers" in sys.argv,
    )

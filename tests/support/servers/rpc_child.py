"""A worker process without a model: `python -m tests.support.servers.rpc_child SOCKET`, served by the real service.

The prompt's second token says what its steps do: 0 answer at once, 1 raise, 2 take 0.2 s, 3 answer with
prompt logprobs of several megabytes, 4 panic as Rust code does, 5 wait until there is a file SOCKET.go. With
"overlapping", plans without new sequences are launched ahead, and the device is slow: it has computed a step when the
next was launched, or when there is SOCKET.go; with "seen" too, all but their rest.
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

REPOSITORY = Path(__file__).parents[3]

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
ANSWER, RAISE, SLEEP, FLOOD, PANIC, HELD = range(6)


class PanicException(BaseException):
    """PyO3 makes one of a panic in Rust; it is no Exception."""


class ScriptedRunner(Worker):
    def __init__(self, path: Path | None = None) -> None:
        """path: see `HELD` and `let_go`; None where no step is held."""
        self.behaviour: dict[int, int] = {}  # by request slot
        self._path = path

    def ready(self) -> WorkerReady:
        return READY

    @property
    def may_go(self) -> bool:
        assert self._path is not None
        return self._path.with_suffix(".go").exists()

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
        while HELD in kinds and not self.may_go:
            time.sleep(0.001)
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

    def __init__(self, path: Path, *, awaits_seen: bool) -> None:
        """awaits_seen: PATH.N says that the result of step N has been seen."""
        super().__init__(path)
        self._seen = path if awaits_seen else None
        self._under_way: StepPlan | None = None
        self._has_rest = False
        self._launched = 0

    def start(self, plan: StepPlan) -> None:
        assert self._under_way is None
        self._under_way, self._launched = plan, plan.step

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    @property
    def is_computed(self) -> bool:
        assert self._under_way is not None
        assert not self._has_rest
        return self._launched > self._under_way.step or self.may_go

    def may_follow(self, plan: StepPlan) -> bool:
        return not plan.new_seqs

    def advance(self, plan: StepPlan) -> StepResult:
        self._launched = plan.step
        result = self.finish()
        self._under_way, self._has_rest = plan, True
        return result

    def launch_rest(self) -> None:
        """With a plan that was launched ahead, waits for the file that says that the result before has been seen."""
        if self._has_rest and self._seen is not None:
            seen = self._seen.with_suffix(f".{self._launched - 1}")
            while not seen.exists():
                time.sleep(0.001)
        self._has_rest = False

    def finish(self) -> StepResult:
        assert self._under_way is not None
        assert not self._has_rest
        plan, self._under_way = self._under_way, None
        return msgspec.structs.replace(self.step(plan), compute_ms=float(self._launched))

    def expert_use(self) -> ExpertUse:
        assert self._under_way is None
        return EXPERT_USE


def runner_of(options: list[str], path: Path) -> ScriptedRunner:
    if "overlapping" not in options:
        return ScriptedRunner(path)
    return OverlappingRunner(path, awaits_seen="seen" in options)


def let_go(path: Path) -> None:
    """Whatever the worker at `path` holds, and from now on nothing is held."""
    path.with_suffix(".go").touch()


@contextmanager
def child_process(path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A scripted worker that listens at `path`; with "outlives routers" one that no router ends."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers.rpc_child", str(path), *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "listening\n", child.communicate(timeout=60)
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

"""A router, the link, a proxy that delays and cuts, the gate, and a worker process without a model."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.launcher.launched_config import write_config
from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import ProcessReady, ReplaceWorker, WorkerExited
from moeserve.messages.steps import NewSeq, StepPlan, StepResult
from moeserve.messages.worker import WorkerAnswer, WorkerDied
from moeserve.models.open import open_metadata
from moeserve.processes.lifecycle import Process
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.remote.fingerprint import fingerprint
from moeserve.remote.link import Link
from moeserve.router.replacement import LinkedWorkers
from moeserve.router.worker_client import RpycWorker
from tests.processes.rpc_world import plan, results
from tests.support.faults.delay_proxy import DelayProxy
from tests.support.servers.rpc_child import FLOOD, HELD, RAISE, READY, SLEEP, child_process, let_go
from tests.support.servers.waiting import within
from tests.unit.remote.conftest import READY as GATES_READY
from tests.unit.remote.conftest import RunningGate

DELAY_S = 0.001


class Line:
    """Everything between a router and a worker, on one machine: the link is a process, and so is the worker."""

    def __init__(self, certificates: Path, model: Path, folder: Path) -> None:
        self._worker_path = folder / "worker-behind-the-gate"
        self.gate = RunningGate(certificates, self._connect_worker)
        self.gate.fingerprint = fingerprint(open_metadata(model))
        self.proxy = DelayProxy(self.gate.address, DELAY_S)
        self.paths = RuntimePaths(folder)
        self.config = ServerConfig(
            model=str(model),
            worker=f"127.0.0.1:{self.proxy.port}",
            worker_ssl_certfile=str(certificates / "server.pem"),
            worker_ssl_keyfile=str(certificates / "server.key"),
            worker_ssl_ca_certs=str(certificates / "ca.pem"),
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.to_launcher = PullChannel(self.context, self.paths.launcher, codec.TO_LAUNCHER)
        self.to_router = PullChannel(self.context, self.paths.router, codec.TO_ROUTER)
        self.launcher = PushChannel(self.context, self.paths.launcher)
        self.workers = LinkedWorkers(self.paths.worker, self.launcher)
        write_config(self.config, self.paths)
        environment = os.environ | {"MOESERVE_RUNTIME_DIR": str(folder)}
        self.link = subprocess.Popen([sys.executable, "-m", "moeserve.remote"], env=environment)
        self._stack = ExitStack()
        self._child: subprocess.Popen[str] | None = None

    def _connect_worker(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self._worker_path))
        return sock

    def worker(self) -> subprocess.Popen[str]:
        """The worker's process, started where there is none."""
        if self._child is None or self._child.poll() is not None:
            self._child = self._stack.enter_context(child_process(self._worker_path))
        return self._child

    def connect(self, seconds: float = 60.0) -> RpycWorker:
        """The worker, as a router finds it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (worker := self.workers.connect()) is not None:
                assert worker.ready() == READY
                return worker
            time.sleep(0.005)
        raise TimeoutError

    def let_go(self) -> None:
        """Whatever steps the worker holds, until the end of the test."""
        let_go(self._worker_path)

    def hold(self) -> None:
        self._worker_path.with_suffix(".go").unlink(missing_ok=True)

    def close(self) -> None:
        self.link.kill()
        self.link.wait()
        self.proxy.close()
        self.gate.close()
        self._stack.close()
        for channel in (self.to_launcher, self.to_router, self.launcher):
            channel.close()
        self.context.term()


@pytest.fixture(scope="module")
def shared_line(
    certificates: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Line]:
    made = Line(certificates, tiny_model, tmp_path_factory.mktemp("run"))
    made.worker()
    ready = made.to_launcher.recv(60)
    assert isinstance(ready, ProcessReady)
    assert ready.engine == GATES_READY
    yield made
    made.close()


@pytest.fixture
def line(shared_line: Line) -> Iterator[Line]:
    """With a worker, and nothing said to the router or the launcher yet."""
    shared_line.worker()
    shared_line.to_router.drain()
    shared_line.proxy.delay = DELAY_S
    yield shared_line
    shared_line.hold()
    assert shared_line.link.poll() is None


def test_a_link_connects_a_router_and_a_worker(line: Line) -> None:
    worker = line.connect()
    for step in range(3):
        assert worker.step(plan(step)).sampled[0].token_id == 100
    assert worker.expert_use().tokens
    worker.close()


@pytest.mark.slow  # gate, proxy and router share this process here: on a busy machine one is silent for too long
def test_long_messages_pass_both_ways_at_once(line: Line) -> None:
    """Plans larger than every buffer on the way, while the worker sends megabytes."""
    worker = line.connect()
    worker.step(plan(0, FLOOD))
    for step in (1, 2, 3):
        worker.submit(
            StepPlan(step, [NewSeq(1, bytes(8 << 20), 4, b"", SamplingParams(max_tokens=1))], plan(0).rows)
        )
    answers: list[WorkerAnswer] = []
    deadline = time.monotonic() + 60
    while len(answers) < 3 and time.monotonic() < deadline:
        answers += worker.poll()
        time.sleep(0.001)
    steps = [answer for answer in answers if isinstance(answer, StepResult)]
    assert [(len(answer.prompt_logprobs[0]), answer.step) for answer in steps] == [
        (20_000, step) for step in (1, 2, 3)
    ]
    worker.close()


def test_one_message_a_step_goes_each_way(line: Line) -> None:
    """So a step costs one round trip, and none where two plans are under way."""
    worker = line.connect()
    worker.step(plan(0))
    before = dict(line.proxy.reads)
    for step in range(1, 41):
        worker.step(plan(step))
    for way, reads in line.proxy.reads.items():
        assert 40 <= reads - before[way] < 2 * 40, "a few are heartbeats"
    sent = line.proxy.reads["to the worker"]
    worker.submit(plan(41, HELD))
    worker.submit(plan(42, HELD))
    assert within(30, lambda: line.proxy.reads["to the worker"] >= sent + 2)
    assert worker.poll() == []
    line.let_go()
    assert [answer.step for answer in results(worker, 2)] == [41, 42]
    worker.close()


def test_a_line_that_falls_silent_is_lost_within_two_seconds_and_comes_back(line: Line) -> None:
    worker = line.connect()
    line.proxy.freeze()
    with pytest.raises(WorkerDied):
        worker.step(plan(0))
    line.workers.replace(worker.pid, "lost")
    worker.close()
    exited = line.to_router.recv(30)
    assert isinstance(exited, WorkerExited)
    assert not exited.by_itself
    assert "nothing was heard for 1.5 s" in exited.cause
    assert line.workers.connect() is None
    line.proxy.thaw()
    worker = line.connect()
    assert worker.step(plan(0)).sampled[0].token_id == 100
    worker.close()
    assert line.to_launcher.recv(0.1) is None  # the link is not to be replaced


def test_a_line_that_is_cut_is_lost_at_once_and_comes_back(line: Line) -> None:
    worker = line.connect()
    worker.submit(plan(0, SLEEP))
    line.proxy.cut()
    with pytest.raises(WorkerDied):
        worker.step(plan(1))
    exited = line.to_router.recv(30)
    assert isinstance(exited, WorkerExited)
    assert "nothing was heard" not in exited.cause
    worker.close()
    time.sleep(0.3)
    line.proxy.mend()
    worker = line.connect()
    worker.close()


def test_a_worker_that_fails_says_why_before_the_line_ends(line: Line) -> None:
    child = line.worker()
    worker = line.connect()
    with pytest.raises(WorkerDied, match="the model is on fire"):
        worker.step(plan(0, RAISE))
    worker.close()
    child.wait(30)
    line.worker()
    worker = line.connect()
    assert worker.step(plan(0)).sampled[0].token_id == 100
    worker.close()


def test_the_next_router_finds_the_worker_again(line: Line) -> None:
    for step in range(3):
        worker = line.connect()
        assert worker.step(plan(step)).step == step
        worker.close()
        time.sleep(0.05)  # the link has seen it


def test_a_link_that_does_not_answer_is_the_launchers_to_replace(line: Line) -> None:
    worker = line.connect()
    line.workers.replace(worker.pid, "a step takes too long")  # the router gives up; nothing was closed
    worker.close()
    assert isinstance(line.to_launcher.recv(30), ReplaceWorker)
    line.workers = LinkedWorkers(line.paths.worker, line.launcher)  # this one looks for another process


def test_a_link_waits_for_its_worker(line: Line) -> None:
    before = line.gate.refusals
    line.gate.refusal = "the worker is loading its model"

    def is_refused() -> bool:
        if (worker := line.workers.connect()) is not None:  # admitted before
            worker.close()
        return line.gate.refusals > before

    assert within(30, is_refused)
    assert line.workers.connect() is None
    line.gate.refusal = ""
    line.connect().close()


@contextmanager
def first_start(config: ServerConfig, folder: Path) -> Iterator[Link]:
    process = Process("worker", config, RuntimePaths(folder))
    link = Link(process)
    try:
        yield link
    finally:
        process.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fingerprint", "another", "it has another model than"),
        ("version", "0.0.1", "it is moeserve 0.0.1, and this"),
    ],
)
def test_a_worker_that_does_not_fit_ends_the_start(
    gate: RunningGate, line: Line, tmp_path: Path, name: str, value: str, message: str
) -> None:
    gate.fingerprint = fingerprint(open_metadata(Path(line.config.model)))
    setattr(gate, name, value)
    config = dataclasses.replace(line.config, worker=f"127.0.0.1:{gate.address[1]}")
    with first_start(config, tmp_path) as link, pytest.raises(ConfigError, match=message):
        link.run()


def test_a_worker_without_the_servers_adapters_ends_the_start(
    gate: RunningGate, line: Line, tmp_path: Path
) -> None:
    gate.fingerprint = fingerprint(open_metadata(Path(line.config.model)))
    config = dataclasses.replace(
        line.config, worker=f"127.0.0.1:{gate.address[1]}", lora_modules=("polite=/adapters/polite",)
    )
    with first_start(config, tmp_path) as link, pytest.raises(ConfigError, match="--lora-modules are none"):
        link.run()


def test_a_worker_that_does_not_trust_the_server_ends_the_start(
    gate: RunningGate, strangers_certificates: Path, line: Line, tmp_path: Path
) -> None:
    """The gate's alert comes after the link's own handshake."""
    config = dataclasses.replace(
        line.config,
        worker=f"127.0.0.1:{gate.address[1]}",
        worker_ssl_certfile=str(strangers_certificates / "server.pem"),
        worker_ssl_keyfile=str(strangers_certificates / "server.key"),
    )
    with (
        first_start(config, tmp_path) as link,
        pytest.raises(ConfigError, match=r"--worker 127.0.0.1:\d+: TLS: .*alert"),
    ):
        link.run()


def test_a_fingerprint_needs_no_weights_and_tells_models_apart(tiny_model: Path, tmp_path: Path) -> None:
    whole = tiny_model.read_bytes()
    header = open_metadata(tiny_model)
    beginning = tmp_path / "beginning.gguf"
    size = len(whole) - sum(len(header.data(name).reshape(-1)) for name in header.tensors)
    beginning.write_bytes(whole[:size])
    assert fingerprint(open_metadata(beginning)) == fingerprint(header)
    other = tmp_path / "other.gguf"
    word = next(at for at in range(size) if whole[at : at + 5] == b"quick" or whole[at : at + 3] == b"the")
    other.write_bytes(whole[:word] + b"T" + whole[word + 1 :])
    assert fingerprint(open_metadata(other)) != fingerprint(header)
    assert fingerprint(open_metadata(tiny_model.with_name("tiny-qwen2moe-q4_k_m.gguf"))) != fingerprint(
        header
    )

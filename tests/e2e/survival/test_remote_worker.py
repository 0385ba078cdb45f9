"""A server whose worker is behind TCP, TLS and a network that delays, falls silent and is cut."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import IS_BATCH_INVARIANT
from tests.e2e.completions import completion, is_empty
from tests.e2e.survival.killed_answers import all_at_once, bodies, has_generated, health
from tests.support.faults.delay_proxy import DelayProxy
from tests.support.servers.server import REPOSITORY, Server, clean_environment, running_server, title_of
from tests.support.servers.suspending import suspend
from tests.support.servers.waiting import within
from tests.support.servers.worker_host import WorkerHost, link_flags, make_certificates, running_worker

pytestmark = pytest.mark.skipif(not IS_BATCH_INVARIANT, reason="compares answers bit for bit")

DELAY_S = 0.0005
PATIENCE = ("--step-timeout", "5", "--max-engine-crashes", "100")
FLAGS = ("--max-num-batched-tokens", "512")


@dataclass
class Remote:
    """A server, the network between, and a worker; what a test breaks, it leaves whole."""

    certificates: Path
    host: WorkerHost
    proxy: DelayProxy
    server: Server

    def worker(self) -> psutil.Process:
        (process,) = (p for p in self.host.family() if title_of(p) == "moeserve: worker")
        return process


@pytest.fixture(scope="module")
def remote(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    with running_worker(tiny_model, certificates, *FLAGS, *PATIENCE) as host:
        proxy = DelayProxy(("127.0.0.1", host.port), DELAY_S)
        with pytest.MonkeyPatch.context() as environment:
            environment.delenv("MOESERVE_TEST_DEVICE")  # the worker's affair
            environment.delenv("MOESERVE_TEST_FLAGS")
            with running_server(tiny_model, *link_flags(certificates, proxy.port), *PATIENCE) as server:
                yield Remote(certificates, host, proxy, server)
        proxy.close()


def expected(server: Server) -> list[Any]:
    """What a server with a worker of its own answers."""
    with all_at_once(server, bodies()) as answers:
        return [answer.result()[0] for answer in answers]


@pytest.fixture(scope="module")
def local_answers(server: Server) -> list[Any]:
    return expected(server)


def results(answers: list[Future[Any]]) -> list[Any]:
    return [answer.result()[0] for answer in answers]


@pytest.mark.slow
def test_answers_are_those_of_a_local_worker_bit_for_bit(remote: Remote, local_answers: list[Any]) -> None:
    """Greedy, sampled, penalties, logprobs, tools and a schema."""
    assert expected(remote.server) == local_answers
    assert remote.proxy.bytes_forwarded > 10_000
    assert within(30, lambda: is_empty(remote.server))


@pytest.mark.slow
@pytest.mark.waits_for_processes("two processes agree within 2 s by the clock")
def test_answers_go_on_after_a_silence_which_is_noticed_in_two_seconds(
    remote: Remote, local_answers: list[Any]
) -> None:
    with all_at_once(remote.server, bodies()) as answers:
        assert within(30, lambda: has_generated(remote.server, 100))
        remote.proxy.freeze()
        begun = time.monotonic()
        assert within(30, lambda: health(remote.server) == 503)
        assert time.monotonic() - begun < 2.0
        remote.proxy.thaw()
        assert results(answers) == local_answers
    assert health(remote.server) == 200
    assert "nothing was heard for 1.5 s" in remote.server.log


def test_answers_go_on_after_a_cut(remote: Remote, local_answers: list[Any]) -> None:
    with all_at_once(remote.server, bodies()) as answers:
        time.sleep(0.2)
        remote.proxy.cut()
        assert within(30, lambda: health(remote.server) == 503)
        remote.proxy.mend()
        assert results(answers) == local_answers


def test_answers_go_on_after_the_workers_crash(remote: Remote, local_answers: list[Any]) -> None:
    with all_at_once(remote.server, bodies()) as answers:
        time.sleep(0.2)
        remote.worker().kill()
        assert results(answers) == local_answers
    assert "signal 9, Killed" in remote.server.log  # the gate has told the link


def test_answers_go_on_though_the_keeper_of_the_weights_is_stopped(
    remote: Remote, local_answers: list[Any]
) -> None:
    """It has to say that its worker has died: the gate waited for ever."""
    (keeper,) = (p for p in remote.host.family() if title_of(p) == "moeserve: weights")
    worker = remote.worker()
    with all_at_once(remote.server, bodies()) as answers:
        time.sleep(0.2)
        suspend(keeper)
        worker.kill()
        assert results(answers) == local_answers
    assert keeper.is_running()


@pytest.mark.slow
def test_answers_go_on_after_the_worker_hangs(remote: Remote, local_answers: list[Any]) -> None:
    """The router notices, the launcher replaces the link, and the worker's host the worker."""
    worker = remote.worker()
    with all_at_once(remote.server, bodies()) as answers:
        time.sleep(0.2)
        suspend(worker)
        assert results(answers) == local_answers
    assert not worker.is_running()
    assert remote.worker() != worker
    remote.server.family = remote.server.processes()


def test_the_worker_serves_the_router_that_replaces_another(remote: Remote, local_answers: list[Any]) -> None:
    worker = remote.worker()
    with all_at_once(remote.server, bodies()) as answers:
        time.sleep(0.2)
        remote.server.named("router").kill()
        assert results(answers) == local_answers
    assert remote.worker() == worker
    assert within(30, lambda: is_empty(remote.server))


def test_the_link_is_replaced(remote: Remote) -> None:
    remote.server.named("link").kill()
    assert within(
        60, lambda: health(remote.server) == 200 and "another worker is started" in remote.server.log
    )
    assert completion(remote.server, prompt="hello")["text"]
    remote.server.family = remote.server.processes()


def test_a_server_with_another_model_does_not_start(remote: Remote, tiny_model: Path) -> None:
    other = tiny_model.with_name("tiny-qwen2moe-q4_k_m.gguf")
    command = [sys.executable, str(REPOSITORY / "launch.py"), "--model", str(other), "--port", "0"]
    command += link_flags(remote.certificates, remote.host.port)
    remote.proxy.cut()  # so that the worker is free
    ended = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    remote.proxy.mend()
    assert ended.returncode == 1
    assert "it has another model than" in ended.stderr
    assert within(30, lambda: health(remote.server) == 200)


@pytest.mark.slow
def test_service_returns_when_the_worker_does(remote: Remote) -> None:
    """The worker's whole machine, as it were: a request waits for it."""
    remote.host.kill()
    assert within(30, lambda: health(remote.server) == 503)
    with all_at_once(remote.server, bodies()[:1]) as answers:
        remote.host.start()
        assert within(30, lambda: health(remote.server) == 200)
        assert results(answers)

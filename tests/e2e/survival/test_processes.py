"""What a running server is on its machine: processes, sockets, signals."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.completions import TEXT, completion, from_cache, streamed
from tests.support.servers.idle import comes_to_rest
from tests.support.servers.server import Server, clean_environment, command, common_flags, title_of
from tests.support.servers.waiting import within

PROCESSES = {"httpserver", "router", "detokenizer", "worker"}


@pytest.fixture
def own_server(tiny_model: Path) -> Iterator[Server]:
    """A server that the test may end in its own way."""
    running = Server(tiny_model)
    yield running
    running.kill()


def test_processes_name_themselves(server: Server) -> None:
    titles = {title_of(process) for process in server.processes()}
    assert {f"moeserve: {name}" for name in PROCESSES} <= titles


FOREIGN = (
    "types",
    "random",
    "json",
    "socket",
    "numpy",
    "torch",
    "zmq",
    "jinja2",
    "msgspec",
    "tokenizers",
    "errors",
)


def test_files_of_the_working_directory_are_not_run(tiny_model: Path, tmp_path: Path) -> None:
    """As in a user's own project, whose files have the names of modules that some process imports."""
    for name in FOREIGN:
        (tmp_path / f"{name}.py").write_text(
            "open('ran', 'a').write(__name__)\nraise SystemExit('a foreign file')\n"
        )
    server = Server(tiny_model, cwd=tmp_path)
    try:
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
        body["response_format"] = {"type": "json_object"}  # the process for grammars starts with the first
        server.post("/v1/chat/completions", body)
        assert not (tmp_path / "ran").exists()
        assert server.stop() == 0, server.log
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.cpu_engine("the process with the weights loads the model again")
def test_a_server_outlives_its_working_directory(tiny_model: Path, tmp_path: Path) -> None:
    """Processes that are started again find none, without which PyTorch cannot be loaded."""
    folder = tmp_path / "folder"
    folder.mkdir()
    server = Server(tiny_model, cwd=folder)
    try:
        before = from_cache(server, prompt=TEXT)
        folder.rmdir()
        for name in ("weights", "httpserver"):
            lost = server.named(name)
            lost.kill()
            assert within(60, partial(is_replaced, server, lost)), server.log
        assert completion(server, prompt=TEXT) == before
        assert server.stop() == 0, server.log
    finally:
        server.kill()


def is_replaced(server: Server, lost: psutil.Process) -> bool:
    """It has gone, and the server is well."""
    with suppress(httpx.TransportError):
        return not lost.is_running() and httpx.get(server.base_url + "/health", timeout=30).status_code == 200
    return False


def has_several_gpus() -> bool:
    """Whether $MOESERVE_TEST_FLAGS say so: then NCCL has sockets of its own (docs/reference/security.md)."""
    return "--gpus" in common_flags()


def test_only_the_api_port_listens_on_tcp(server: Server) -> None:
    open_to_all = {
        (connection, title_of(process))
        for process in server.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or connection.type != socket.SOCK_STREAM
    }
    listening = {
        (connection.laddr.port, title)
        for connection, title in open_to_all
        if not (has_several_gpus() and "worker" in title and connection.laddr.ip == "127.0.0.1")
    }
    port = int(server.base_url.rsplit(":", 1)[1])
    assert listening == {(port, "moeserve: httpserver"), (port, "moeserve: launcher")}


def test_sockets_are_in_a_directory_of_ours_alone(server: Server) -> None:
    details = server.runtime_dir.stat()
    assert stat.S_IMODE(details.st_mode) == 0o700
    assert details.st_uid == os.getuid()
    assert any(stat.S_ISSOCK(entry.stat().st_mode) for entry in server.runtime_dir.iterdir())
    for process in server.processes():
        for connection in process.net_connections(kind="unix"):
            path = str(connection.laddr)
            if path.startswith("@cuda-"):
                continue  # the driver's own, in no directory
            if has_several_gpus() and path.startswith("@"):
                continue  # NCCL's
            assert not path or Path(path).parent == server.runtime_dir, f"a socket elsewhere: {path}"


def test_idle_server_uses_no_cpu(server: Server) -> None:
    completion(server, prompt=TEXT)

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in server.processes())

    assert comes_to_rest(cpu_seconds, 0.1, 2.0)


def test_sigterm_drains_and_leaves_nothing(own_server: Server) -> None:
    expected = from_cache(own_server, prompt=TEXT, max_tokens=150)["text"]
    stream = streamed(own_server, prompt=TEXT, max_tokens=150)
    text = next(stream)["choices"][0]["text"]
    own_server.process.send_signal(signal.SIGTERM)
    text += "".join(event["choices"][0]["text"] for event in stream)
    assert text == expected
    assert own_server.process.wait(30) == 0
    assert own_server.survivors() == []
    assert not own_server.runtime_dir.exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(own_server.base_url + "/health")


@pytest.mark.slow
def test_sigterm_to_the_whole_process_group_drains_too(own_server: Server) -> None:
    """As a terminal's Ctrl-C or a service manager does it."""
    expected = from_cache(own_server, prompt=TEXT, max_tokens=150)["text"]
    stream = streamed(own_server, prompt=TEXT, max_tokens=150)
    text = next(stream)["choices"][0]["text"]
    for process in own_server.family:
        process.send_signal(signal.SIGTERM)
    assert text + "".join(event["choices"][0]["text"] for event in stream) == expected
    assert own_server.process.wait(30) == 0
    assert own_server.survivors() == []


def test_health_says_loading_until_it_is_ready(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    arguments = command(tiny_model, "--port", str(port))
    answers: list[tuple[int, str]] = []

    def is_ready() -> bool:
        with suppress(httpx.TransportError):
            response = httpx.get(f"http://127.0.0.1:{port}/health", timeout=30)
            answers.append((response.status_code, response.json()["status"]))
        return bool(answers) and answers[-1][0] == 200

    with subprocess.Popen(arguments, env=clean_environment(), stderr=subprocess.DEVNULL) as process:
        try:
            assert within(60, is_ready)
        finally:
            process.terminate()
            process.wait(60)
    assert answers[0] == (503, "loading")
    assert answers[-1] == (200, "ok")


def test_a_port_in_use_is_named(server: Server) -> None:
    port = server.base_url.rsplit(":", 1)[1]
    result = subprocess.run(
        command(None, "--port", port), env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode > 0
    assert port in result.stderr
    assert "Traceback" not in result.stderr


def test_death_of_the_launcher_leaves_nobody(own_server: Server) -> None:
    own_server.process.kill()
    assert own_server.process.wait(30) == -signal.SIGKILL
    assert own_server.survivors() == []

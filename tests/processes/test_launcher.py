"""The launcher with real processes, sockets and signals: ready, stopped, failed; nothing is left behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.launcher.exit_codes import EXIT_ENGINE_LOST
from moeserve.launcher.process_table import PROCESSES
from moeserve.processes.lifecycle import load_config
from moeserve.processes.runtime_paths import RuntimePaths
from tests.support.nightly import nightly_after
from tests.support.servers.idle import comes_to_rest
from tests.support.servers.launcher_run import Run
from tests.support.servers.server import title_of
from tests.support.servers.suspending import suspend


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ready_then_stopped_by_a_signal(start: Callable[..., Run], signum: int) -> None:
    run = start().until_ready()
    assert re.search(r"ready: http://127\.0\.0\.1:\d+, memory used 0\.\d+ GiB, 65,536 KV tokens", run.log)
    assert run.titles.keys() == {f"moeserve: {name}" for name in ("launcher", "zygote", *PROCESSES)}
    run.popen.send_signal(signum)
    assert run.end() == 0, run.log
    assert "ERROR" not in run.log
    assert "Traceback" not in run.log


def test_runtime_directory_is_private_and_the_sockets_are_in_it(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    assert stat.S_IMODE(run.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.directory / "config.json").stat().st_mode) == 0o600
    assert json.loads((run.directory / "config.json").read_text())["api_key"] == ["secret"]
    sockets = {path.name for path in run.directory.iterdir() if path.is_socket()}
    assert sockets >= {"launcher", "router", "detokenizer", "worker"}
    listening = {(c.laddr.port, title_of(p)) for p in run.family for c in p.net_connections(kind="inet")}
    owners = ("moeserve: launcher", "moeserve: httpserver")
    assert listening == {(run.address[1], owner) for owner in owners}, "only the API listens on TCP"
    assert "secret" not in run.log


def test_idle_launcher_uses_no_cpu(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    assert comes_to_rest(lambda: sum(run.family[0].cpu_times()[:2]), 0.02, 1.0)


def test_start_up_error_is_shown_as_the_child_worded_it(start: Callable[..., Run]) -> None:
    run = start("httpserver:user error")
    assert run.end() == 1
    assert (
        "the server could not start: port 8000 is in use; choose another with --port (httpserver)" in run.log
    )
    assert "Traceback" not in run.log


def test_os_error_while_starting_is_for_the_user_too(start: Callable[..., Run]) -> None:
    run = start("httpserver:no such file")
    assert run.end() == 1
    assert "the server could not start: " in run.log
    assert "No such file or directory" in run.log
    assert "Traceback" not in run.log


def test_a_port_in_use_is_told_before_anything_is_started(start: Callable[..., Run]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        run = start(port=busy.getsockname()[1])
        assert run.end() == 1
    assert "is in use: choose another with --port" in run.log
    assert "Traceback" not in run.log


def test_bug_while_starting_shows_its_traceback(start: Callable[..., Run]) -> None:
    run = start("router:bug")
    assert run.end() == 1
    assert "the server could not start: RuntimeError: a bug (router)" in run.log
    assert "Traceback" in run.log


def test_a_child_that_cannot_be_imported_says_why_and_where(start: Callable[..., Run]) -> None:
    run = start("httpserver:bad import")
    assert run.end() == 1
    cause = "ModuleNotFoundError: No module named 'there_is_no_such_module'"
    assert re.search(rf"httpserver could not be imported: {cause} \(.+/httpserver\.py, line \d+\)", run.log)
    assert (
        "died while starting: exit code 4: a module could not be imported, as the lines above say" in run.log
    )


def test_child_killed_while_starting_is_noticed(start: Callable[..., Run]) -> None:
    run = start("worker:killed while starting")
    assert run.end() == 1
    assert "worker died while starting: signal 9, Killed; out of memory?" in run.log


def test_stop_while_starting_does_not_wait(start: Callable[..., Run]) -> None:
    run = start("worker:slow start")
    run.wait_for(lambda: len(psutil.Process(run.popen.pid).children()) == 5)
    run.popen.send_signal(signal.SIGTERM)
    assert run.end(30) == 0


def kill_worker(run: Run, signum: int = signal.SIGKILL) -> None:
    """Once it is ready; the next has a new process."""
    worker = run.child("worker")
    backs = run.log.count("the engine is back")
    worker.send_signal(signum)
    run.wait_for(lambda: run.popen.poll() is not None or run.log.count("the engine is back") > backs)
    if run.popen.poll() is None:
        (run.titles["moeserve: worker"],) = [
            p for p in psutil.Process(run.popen.pid).children() if p.cmdline()[0] == "moeserve: worker"
        ]
        run.family.append(run.child("worker"))


def test_a_dead_worker_is_replaced_and_the_router_told_why(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    config = run.directory / "config.json"
    # Where it would be written: as if the disk were full now.
    config.with_suffix(".new").touch(exist_ok=False)
    kill_worker(run)
    run.wait_for_log("worker died (signal 9, Killed; out of memory?)")
    run.wait_for_log("WorkerExited(cause='signal 9, Killed; out of memory?', by_itself=False)")
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    pinned = load_config(RuntimePaths(run.directory))
    assert (pinned.max_total_tokens, pinned.max_model_len) == (65_536, 512)
    kill_worker(run, signal.SIGSEGV)
    run.wait_for_log("WorkerExited(cause='signal 11, Segmentation fault', by_itself=True)")
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def test_three_crashes_in_a_minute_end_the_server(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    for _ in range(3):
        kill_worker(run)
    assert run.end() == EXIT_ENGINE_LOST
    assert "processes crashed 3 times in a minute" in run.log


def test_a_worker_that_cannot_start_again_ends_the_server(start: Callable[..., Run]) -> None:
    run = start("worker:dies again").until_ready()
    kill_worker(run)
    assert run.end() == EXIT_ENGINE_LOST
    assert "there is no room for the model any more" in run.log
    assert "the worker cannot be started again" in run.log


def test_a_worker_that_the_router_gives_up_is_killed_once(start: Callable[..., Run]) -> None:
    run = start("router:gives up").until_ready()
    run.wait_for_log("the engine is back")
    assert run.log.count("worker died (the worker does not answer; killed)") == 1, run.log
    assert "by_itself=True" in run.log
    assert "said twice" not in run.log
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def test_a_lost_httpserver_is_replaced_and_the_router_told(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    others = [run.child(name) for name in ("router", "detokenizer", "worker")]
    host, port = run.address
    run.child("httpserver").kill()
    with socket.create_connection((host, port), timeout=30):  # it waits for the next
        run.wait_for_log("the engine is back: the httpserver was ready")
    run.wait_for_log(f"HttpserverLost(first_id={(1 << 40) + 1})")
    assert f"serves requests from {(1 << 40) + 1} on" in run.log
    run.until_ready()
    assert [run.child(name) for name in ("router", "detokenizer", "worker")] == others
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log
    with pytest.raises(ConnectionError):
        socket.create_connection((host, port), timeout=30)


def test_httpservers_that_die_again_and_again_end_the_server(start: Callable[..., Run]) -> None:
    run = start("httpserver:bug while serving").until_ready()
    (run.directory / "go").touch()
    assert run.end() == EXIT_ENGINE_LOST
    assert run.log.count("httpserver died (exit code 1): RuntimeError: a bug while serving") == 3, run.log
    assert "processes crashed 3 times in a minute" in run.log


@pytest.mark.parametrize("name", ["router", "detokenizer"])
def test_another_process_is_replaced_and_httpserver_told_why(start: Callable[..., Run], name: str) -> None:
    run = start().until_ready()
    worker = run.child("worker")
    run.child(name).kill()
    run.wait_for_log("the engine is back")
    run.wait_for_log(
        f"ProcessLost(process='{name}', cause='signal 9, Killed; out of memory?', by_itself=False)"
    )
    run.until_ready()
    assert run.titles.keys() == {f"moeserve: {name}" for name in ("launcher", "zygote", *PROCESSES)}
    assert run.child("worker") == worker
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


@pytest.mark.parametrize("name", nightly_after(1, ["httpserver", "router", "detokenizer"]))
def test_a_process_that_stands_still_is_replaced(start: Callable[..., Run], name: str) -> None:
    run = start(step_timeout=2.5).until_ready()
    suspend(run.child(name))
    run.wait_for_log("the engine is back")
    cause = f"the {name} does not answer, because it was stopped; killed"
    if name == "httpserver":
        run.wait_for_log(f"httpserver died ({cause})")
        run.wait_for_log("HttpserverLost(")
    else:
        run.wait_for_log(f"ProcessLost(process='{name}', cause='{cause}', by_itself=False)")
    assert run.log.count("the engine is back") == 1, run.log
    run.until_ready()
    time.sleep(2.7)
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log
    assert run.log.count(" died (") == 1, run.log


def test_bugs_while_serving_are_logged_with_their_cause_and_three_end_the_server(
    start: Callable[..., Run],
) -> None:
    run = start("detokenizer:bug while serving").until_ready()
    (run.directory / "go").touch()
    assert run.end() == EXIT_ENGINE_LOST
    assert run.log.count("detokenizer died (exit code 1): RuntimeError: a bug while serving") == 3, run.log
    assert "processes crashed 3 times in a minute" in run.log
    assert "Traceback" in run.log


def test_second_signal_stops_at_once(start: Callable[..., Run]) -> None:
    run = start("httpserver:hang", timeout=60).until_ready()
    run.popen.send_signal(signal.SIGTERM)
    run.wait_for_log("stopping: ")
    time.sleep(0.2)
    assert run.popen.poll() is None
    run.popen.send_signal(signal.SIGTERM)
    assert run.end(30) == 1


def test_straggler_is_killed_and_named(start: Callable[..., Run]) -> None:
    run = start("detokenizer:hang").until_ready()
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 1
    assert "detokenizer did not stop in time and is killed" in run.log


def test_inner_processes_outlive_signals_to_the_whole_group(start: Callable[..., Run]) -> None:
    """systemd and Ctrl-C signal every process; only the launcher and httpserver may act on it."""
    run = start().until_ready()
    for name in ("router", "detokenizer", "worker"):
        run.child(name).send_signal(signal.SIGINT)
        run.child(name).send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert all(run.child(name).is_running() for name in PROCESSES)
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def test_children_die_with_a_killed_launcher(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    run.popen.kill()
    _, alive = psutil.wait_procs(run.family[1:], timeout=30)
    assert alive == []


def test_a_hangup_is_passed_on_and_ends_nothing(start: Callable[..., Run]) -> None:
    run = start().until_ready()
    run.popen.send_signal(signal.SIGHUP)
    run.wait_for_log("httpserver has a SIGHUP")
    assert all(run.child(name).is_running() for name in PROCESSES)
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def is_connected(run: Run, name: str) -> bool:
    """Whether somebody has connected to the socket of a process."""
    path = str(run.directory / name)
    paths = [line.laddr for line in run.child(name).net_connections("unix")]
    return paths.count(path) > 1


def test_a_lost_directory_does_not_matter_to_the_end(start: Callable[..., Run]) -> None:
    """As a cleaner of temporary files takes it. Shutdown could not be said, and the exit code was 1."""
    run = start().until_ready()
    run.wait_for(lambda: all(is_connected(run, name) for name in ("router", "detokenizer")))
    shutil.rmtree(run.directory)
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


def test_systemd_is_told(start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []

    def listen(listener: socket.socket) -> None:
        while not told or told[-1] != b"STOPPING=1":
            told.append(listener.recv(64))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        listening = threading.Thread(target=listen, args=(listener,))
        listening.start()
        run = start().until_ready()
        run.wait_for(lambda: b"READY=1" in told and told[told.index(b"READY=1") :].count(b"WATCHDOG=1") >= 3)
        run.popen.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.log
        listening.join()
    assert told.count(b"READY=1") == 1


def test_ignored_hangup_stays_ignored(start: Callable[..., Run]) -> None:
    run = start(nohup=True).until_ready()
    run.popen.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert run.popen.poll() is None
    run.popen.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.log


# ---------------------------------------------------------------- the pieces


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"port": "8000"}', "port"),
        ('{"prot": 8000}', "prot"),
        ('{"port": 8000', "config.json"),
        ('{"threads": 1.5}', "threads"),
    ],
)
def test_child_refuses_a_config_that_is_not_ours(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(RuntimePaths(tmp_path))


def test_child_reads_what_the_launcher_wrote(tmp_path: Path) -> None:
    from moeserve.launcher.launched_config import write_config

    config = ServerConfig(model="/m.gguf", threads=3, shutdown_timeout=1, api_key=("k",))
    write_config(config, RuntimePaths(tmp_path))
    assert load_config(RuntimePaths(tmp_path)) == config

"""The kernel's limits of a process: those that are too low for a server, and those that it sets itself."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import httpx
import pytest

from moeserve.errors import ConfigError
from moeserve.launcher.exit_codes import EXIT_FAILED
from moeserve.processes import limits
from tests.conftest import TINY_MODEL
from tests.support.servers.engine_messages import CONTEXT
from tests.support.servers.http_harness import http_server
from tests.support.servers.server import REPOSITORY, clean_environment

MIB = 1 << 20


@pytest.mark.parametrize(
    ("kind", "limit", "said"),
    [
        (resource.RLIMIT_NOFILE, 20, "the limit of open files is 20, and a server needs 256 at least"),
        (resource.RLIMIT_STACK, MIB, "the limit of the stack is 1024 KiB, and a server needs 2048"),
        (resource.RLIMIT_AS, 1000 * MIB, "the limit of address space is 0.98 GiB"),
        # The code fits, weights and KV do not: the worker says so.
        pytest.param(
            resource.RLIMIT_AS,
            1537 * MIB,
            "are free after the weights; ask for at most",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_limit_that_is_too_low_is_told(kind: int, limit: int, said: str) -> None:
    flags = ["--port", "0", "--model", str(TINY_MODEL), "--max-total-tokens", "1000000"]
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "launch.py"), *flags],
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
        preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == EXIT_FAILED, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSYS, "has no pidfd_open .*: a server needs Linux 5.3 or newer"),
        (errno.EPERM, "forbids pidfd_open: update the container runtime"),
        (errno.ENFILE, r"pidfd_open failed \(Too many open files in system\): free memory and open files"),
    ],
)
def test_a_kernel_without_a_call_is_told(monkeypatch: pytest.MonkeyPatch, number: int, said: str) -> None:
    """The start ended with a traceback."""

    def fail(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(ConfigError, match=said):
        limits.prepare_limits()


def test_a_python_without_a_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build of Conda for 3.11 ended with an AttributeError."""
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(ConfigError, match="this Python was compiled with the headers of a kernel before"):
        limits.prepare_limits()


def test_too_few_tasks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's thread that could not begin ended the start: "router died while starting: signal 6, Aborted"."""
    monkeypatch.setattr(limits, "usable_cores", lambda: 4)
    for left, said in ((35, "allows 35 more processes and threads, and a server needs 36"), (36, None)):
        monkeypatch.setattr(limits, "tasks_left", partial(int, left))
        with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
            limits.prepare_limits()


@pytest.mark.parametrize(("threads", "needed"), [(1, 33), (8, 40)])
def test_threads_that_are_asked_for_count_as_tasks(
    monkeypatch: pytest.MonkeyPatch, threads: int, needed: int
) -> None:
    """A start with `--threads 1` on a machine of many cores was refused, though it would have worked."""
    monkeypatch.setattr(limits, "usable_cores", lambda: 4)
    monkeypatch.setattr(limits, "tasks_left", lambda: needed)
    limits.prepare_limits(threads)
    monkeypatch.setattr(limits, "tasks_left", lambda: needed - 1)
    with pytest.raises(ConfigError, match=f"a server needs {needed} at least"):
        limits.prepare_limits(threads)


def tasks_of_a_user(soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """Prepares the limits of a process that is not root's, and prints its soft limit then."""
    script = (
        "import os, resource; from moeserve.processes.limits import prepare_limits; "
        "os.geteuid() or os.setuid(65534); prepare_limits(); print(resource.getrlimit(resource.RLIMIT_NPROC)[0])"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_too_few_tasks_of_a_user_are_told() -> None:
    said = tasks_of_a_user(20, 20)
    assert "the limit of the user's processes and threads is 20, and a server needs" in said.stderr


def test_a_low_soft_limit_of_a_users_tasks_is_raised() -> None:
    """The kernel enforces the soft limit: `ulimit -Su 20` ended the start with "signal 6"."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    said = tasks_of_a_user(20, hard)
    assert said.stdout == f"{hard}\n", said.stderr


def test_a_low_soft_limit_of_the_stack_is_raised() -> None:
    """A request of a thousand nested lists would otherwise end the process that reads it."""
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import resource; from moeserve.processes.limits import prepare_limits; prepare_limits(); "
            "print(resource.getrlimit(resource.RLIMIT_STACK)[0] >> 20)",
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (128 << 10, 64 * MIB)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout == "8\n", said.stderr


def test_a_request_that_takes_too_much_memory_ends_alone() -> None:
    """It is parsed on the thread that also writes streams; the one of another request goes on."""
    with http_server(context=1 << 20, max_process_memory=0.125) as server:
        large = b'{"prompt": [' + b"[1]," * (4 * MIB) + b"[1]]}"
        headers = {"content-type": "application/json"}
        body = {"prompt": "Hi", "max_tokens": CONTEXT, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as stream:
            refused = httpx.post(server.url + "/v1/completions", content=large, headers=headers, timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory")
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert server.post("/v1/completions", {"prompt": "Hi"}).status_code == 200

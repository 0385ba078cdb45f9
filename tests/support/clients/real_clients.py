"""Runs clients that `make test-clients` installs against an httpserver whose engine is scripted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from moeserve.cli.agents.agents import AGENTS as LAUNCHED
from moeserve.cli.agents.agents import Endpoint
from tests.support.servers.http_harness import NAME, Answer, HttpServer, say
from tests.support.servers.server import REPOSITORY

PROGRAMS = REPOSITORY / "tests" / "e2e" / "clients" / "programs"
CLIENTS = os.environ.get("MOESERVE_CLIENTS")
TIMEOUT_S = 120
CONTEXT = 1 << 17


def call(name: str, arguments: dict[str, object]) -> Answer:
    written = json.dumps({"name": name, "arguments": arguments})
    return say("<think>", "\nHm.\n", "</think>", "\n\n<tool_call>\n", written, "\n</tool_call>")


def script(server: HttpServer, *answers: Answer) -> None:
    """The server's answers in turn."""
    left = iter(answers)
    server.requests.clear()
    server.answer = lambda one, request: next(left)(one, request)


def search_path() -> str:
    """With the registry's node before the machine's: the newest clients want a newer one than many machines have."""
    own = Path(str(CLIENTS)).resolve() / "node" / "node_modules" / ".bin"
    return f"{own}:{os.environ['PATH']}"


def run(command: list[str], folder: Path, **environment: str) -> str:
    inherited = {"PATH": search_path(), "HOME": str(folder), "LANG": "C.UTF-8"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env=inherited | environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def run_python(server: HttpServer, folder: Path, program: str, environment: str = "venv") -> str:
    name, *arguments = program.split()
    interpreter = Path(str(CLIENTS)).resolve() / environment / "bin" / "python"
    return run([str(interpreter), str(PROGRAMS / f"{name}.py"), server.url, NAME, *arguments], folder)


def binary(name: str) -> str:
    path = Path(str(CLIENTS)).resolve() / "node_modules" / ".bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return str(path)


def run_agent(server: HttpServer, folder: Path, name: str, *arguments: str, **environment: str) -> str:
    """As `moeserve launch` starts it."""
    start = LAUNCHED[name].start(binary(name), Endpoint(server.url, NAME, CONTEXT), arguments)
    for command in start.commands:
        said = run(list(command), folder, **start.environment, **environment)
    return said

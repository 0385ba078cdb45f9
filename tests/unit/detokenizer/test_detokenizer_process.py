"""The detokenizer as a process: it reads the model's vocabulary, and says why it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from moeserve.config import ServerConfig
from moeserve.launcher.launched_config import write_config
from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.sampling import TextOptions
from moeserve.messages.schema import (
    DetokenizeStart,
    Heartbeat,
    ProcessFailed,
    ProcessReady,
    Shutdown,
    TextOut,
    TokensItem,
    TokensOut,
    Usage,
)
from moeserve.processes.runtime_paths import RuntimePaths


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def start_process(paths: RuntimePaths, model: Path) -> subprocess.Popen[str]:
    write_config(ServerConfig(model=str(model)), paths)
    environment = os.environ | {"MOESERVE_RUNTIME_DIR": str(paths.directory)}
    command = [sys.executable, "-m", "moeserve.detokenizer"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_process_reads_the_models_vocabulary_and_ends_on_shutdown(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, tiny_model: Path
) -> None:
    paths = RuntimePaths(tmp_path)
    launcher = PullChannel(context, paths.launcher, codec.TO_LAUNCHER)
    http = PullChannel(context, paths.http, codec.TO_HTTP)
    with start_process(paths, tiny_model) as process:
        assert launcher.recv(timeout=30) == ProcessReady("detokenizer", process.pid)
        push = PushChannel(context, paths.detokenizer)
        push.send(DetokenizeStart(1, TextOptions()))
        usage = Usage(4, 99, 2, 1.0, 2.0, 3.0)
        push.send(TokensOut([TokensItem(1, [72, 78], finish_reason="length", usage=usage)]))
        while isinstance(answer := http.recv(timeout=30), Heartbeat):
            pass
        push.send(Shutdown())
        assert process.wait(30) == 0
    assert isinstance(answer, TextOut)
    assert answer.items[0].text == "io", "GPT-2's table puts i at 72 and o at 78"


def test_process_reports_a_bad_model_to_the_launcher_in_words(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    paths = RuntimePaths(tmp_path)
    launcher = PullChannel(context, paths.launcher, codec.TO_LAUNCHER)
    (tmp_path / "bad.gguf").write_bytes(b"no model at all, but long enough for a header")
    with start_process(paths, tmp_path / "bad.gguf") as process:
        message = launcher.recv(timeout=30)
        assert process.wait(30) == 2
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert isinstance(message, ProcessFailed)
    assert "bad.gguf" in message.message

"""How a worker begins on a GPU: what its keeper must not do, what a fork inherits, and where its seconds go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moeserve.errors import ConfigError
from moeserve.worker.loading.device import choose_in_fork, is_divided
from moeserve.worker.loading.inherited import Inherited
from moeserve.worker.loading.start import StartClock
from tests.gpu.driver import small_config

IMPORTS = """
import torch
def asked(*_):
    raise SystemExit("an import asks for the GPU, whose driver survives no fork")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked
torch.cuda.get_device_capability = torch.cuda.current_device = asked
import moeserve.worker.loading.gpu.load, moeserve.worker.loading.load
import moeserve.worker.loading.keeper, moeserve.worker.loading.inherited
"""
# A keeper whose forks end with an error until there is what it has prepared.
KEEPER = """
import os, socket, sys
from types import SimpleNamespace
from moeserve.worker.loading import keeper

ours, line = socket.socketpair()
found = {"prepared": 0}
def prepare():
    found["prepared"] += 1
def serve(is_first):
    if is_first != (found["prepared"] == 0):
        os._exit(9)
    os._exit(0 if found["prepared"] else 7)
process = SimpleNamespace(close_sockets=lambda: None, open_sockets=lambda: None)
ours.sendall(b"again\\n")
keeper.keep(process, line, serve, "worker start", prepare)
print([word.split()[-1] for word in ours.recv(4096).decode().splitlines() if word.startswith("ended")], found)
"""


def run(program: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # processes that import torch
def test_what_a_keeper_imports_asks_for_no_gpu() -> None:
    run(IMPORTS)


def test_the_second_fork_inherits_what_was_prepared_beside_the_first() -> None:
    assert run(KEEPER).strip() == "['7', '0'] {'prepared': 1}"


def test_a_keeper_prepares_the_file_and_the_vocabulary(tiny_model: Path) -> None:
    inherited = Inherited()
    inherited.prepare(small_config(tiny_model))
    assert inherited.source is not None
    assert inherited.source.path == tiny_model
    assert inherited.grammar is not None


def test_what_cannot_be_prepared_is_the_next_workers_to_say(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    inherited = Inherited()
    inherited.prepare(small_config(tmp_path / "broken.gguf"))
    assert (inherited.source, inherited.grammar) == (None, None)


def test_a_choice_is_made_in_a_fork() -> None:
    assert (choose_in_fork("cpu"), choose_in_fork("cuda")) == ("cpu", "cuda")


@pytest.mark.parametrize("choice", ["cpu", "cuda", None])
def test_what_the_fork_has_chosen(choice: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: it raises, as what is forked next will."""
    ours = os.getpid()

    def choose(wanted: str) -> str:
        assert os.getpid() != ours
        if choice is None:
            raise ConfigError("no GPU")
        return choice

    monkeypatch.setattr("moeserve.worker.loading.device.choose_device", choose)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_in_fork("auto") == (choice or "cuda")


def test_several_gpus_are_several_processes(tiny_model: Path) -> None:
    assert is_divided(small_config(tiny_model, device="cuda", gpus="2"))
    assert not is_divided(small_config(tiny_model, device="cuda", gpus="1"))
    assert not is_divided(small_config(tiny_model, device="cpu", gpus="2"))


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StartClock(began=100.0)
    for phase, now in (("imports", 103.0), ("weights", 106.0), ("imports", 107.0)):
        monkeypatch.setattr("moeserve.worker.loading.start.time.monotonic", lambda now=now: now)
        clock.ended(phase)
    assert clock.seconds == pytest.approx({"imports": 4.0, "weights": 3.0})
    assert clock.described() == "imports 4.00, weights 3.00"


@pytest.mark.slow
def test_a_process_knows_when_it_began() -> None:
    before = time.monotonic()
    said = run(
        "from moeserve.worker.loading.start import process_began; import time; time.sleep(0.3); print(process_began())"
    )
    assert before - 0.02 < float(said) < time.monotonic() - 0.3

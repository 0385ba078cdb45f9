"""How a group of several GPUs' processes ends: no rank outlives another, and what one cannot do is said."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config import ServerConfig, to_json_dict
from moeserve.errors import ConfigError
from moeserve.messages.ranks import RankStart
from moeserve.processes.lifecycle import EXIT_USER_ERROR
from moeserve.worker.group.leader import LeaderGroup
from moeserve.worker.group.line import send
from tests.conftest import TINY_MODEL
from tests.gpu.driver import small_config

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter; tests/gpu has several GPUs")
REFUSING = """
import socket
from moeserve.messages.ranks import RankFailed
from moeserve.worker.group.line import receive_from_leader, send
line = socket.socket(fileno=0)
receive_from_leader(line)
send(line, RankFailed("too small"))
raise SystemExit(2)
"""
CRASHING = "raise SystemExit(7)"
SLEEPING = "import time; time.sleep(60)"
LEADER = """
import sys, time
import tests.kernels.triton_device
from moeserve.config import ServerConfig
from moeserve.worker.group.leader import LeaderGroup
group = LeaderGroup(ServerConfig(), [], 2, (sys.executable, "-c", sys.argv[1]))
print("started", flush=True)
if "waits" in sys.argv:
    group.barrier()
time.sleep(60)
"""


def test_a_rank_that_cannot_load_its_share_says_why() -> None:
    group = LeaderGroup(ServerConfig(), [], 2, (sys.executable, "-c", REFUSING))
    with pytest.raises(ConfigError, match=r"^rank 1: too small$"):
        group.barrier()
    group.close()


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize("waits", [(), ("waits",)], ids=["the leader loads", "the leader waits"])
def test_the_leader_ends_as_its_follower_ended_and_says_why(waits: tuple[str, ...]) -> None:
    """Whether it waits for that one or is busy: in no way it is the leader's own failure that one sees."""
    crashed, refused = started_leader(CRASHING, *waits), started_leader(REFUSING)
    assert crashed.communicate(timeout=60)[1].splitlines() == [
        "the process of rank 1 has ended (exit code 7), and so does the worker"
    ]
    assert refused.communicate(timeout=60)[1] == "rank 1: too small\n"
    assert (crashed.returncode, refused.returncode) == (7, EXIT_USER_ERROR)


@pytest.mark.slow
def test_a_follower_whose_leader_gives_up_ends_quietly(tmp_path: Path) -> None:
    """Its next word has nobody who hears it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "tests.kernels.group.follower"]
        follower = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs.fileno(), stderr=subprocess.PIPE, text=True
        )
        config = msgspec.json.encode(to_json_dict(small_config(TINY_MODEL)))
        send(ours, RankStart(config, 1, [], 2, os.getpid(), str(tmp_path / "rendezvous")))
    assert follower.communicate(timeout=60)[1] == ""
    assert follower.returncode == EXIT_USER_ERROR


@pytest.mark.slow
def test_the_leader_is_killed_with_its_follower_and_fails_with_its_crash() -> None:
    ends = {signal.SIGKILL: -signal.SIGKILL, signal.SIGSEGV: 1}
    leaders = {signum: started_leader(SLEEPING) for signum in ends}
    for signum, leader in leaders.items():
        assert leader.stdout is not None
        assert leader.stdout.readline() == "started\n"
        (follower,) = psutil.Process(leader.pid).children()
        follower.send_signal(signum)
    assert {signum: leader.wait(30) for signum, leader in leaders.items()} == ends


def started_leader(follower: str, *arguments: str) -> subprocess.Popen[str]:
    """follower: its program."""
    return subprocess.Popen(
        [sys.executable, "-c", LEADER, follower, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

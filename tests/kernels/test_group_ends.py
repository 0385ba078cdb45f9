"""How a group of several GPUs' processes ends: no rank outlives another, and what one cannot do is said."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.worker.group.leader import LeaderGroup

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter; tests/gpu has several GPUs")
REFUSING = """
import socket
from moeserve.messages.ranks import RankFailed
from moeserve.worker.group.line import receive_from_leader, send
line = socket.socket(fileno=0)
receive_from_leader(line)
send(line, RankFailed("too small"))
"""
LEADER = """
import sys, time
import tests.kernels.triton_device
from moeserve.config import ServerConfig
from moeserve.worker.group.leader import LeaderGroup
group = LeaderGroup(ServerConfig(), [], 2, (sys.executable, "-c", "import time; time.sleep(60)"))
print("started", flush=True)
time.sleep(60)
"""


def test_a_rank_that_cannot_load_its_share_says_why() -> None:
    group = LeaderGroup(ServerConfig(), [], 2, (sys.executable, "-c", REFUSING))
    with pytest.raises(ConfigError, match="GPU 1 of 2: too small"):
        group.barrier()
    group.close()


@pytest.mark.slow  # two processes that import torch
def test_the_leader_is_killed_with_its_follower_and_fails_with_its_crash() -> None:
    ends = {signal.SIGKILL: -signal.SIGKILL, signal.SIGSEGV: 1}
    leaders = {signum: started_leader() for signum in ends}
    for signum, leader in leaders.items():
        assert leader.stdout is not None
        assert leader.stdout.readline() == "started\n"
        (follower,) = psutil.Process(leader.pid).children()
        follower.send_signal(signum)
    assert {signum: leader.wait(10) for signum, leader in leaders.items()} == ends


def started_leader() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LEADER],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

"""The fork parent of the tests' processes, which may hang."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, signal
from tests.support.servers.forked_process import ForkedProcess, fork_parent

def start(**how):
    process = ForkedProcess("platform", os.environ, **how)
    return process.is_forked, process.wait(120)

first = start()
stopped = fork_parent()
os.kill(stopped, signal.SIGSTOP)
second = start(fork_s=0.5)
third = start()
print(first, second, third, fork_parent() != stopped)
"""


def test_a_fork_parent_that_is_stopped_is_given_up() -> None:
    """The process is started the ordinary way, and the next one is forked from another parent."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=400)
    assert result.stdout.splitlines()[-1] == "(True, 0) (False, 0) (True, 0) True", result.stderr

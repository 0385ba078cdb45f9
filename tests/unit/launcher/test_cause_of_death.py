"""What the launcher says of a process that was killed."""

from __future__ import annotations

import os
import signal

import pytest

from moeserve.launcher import child_process
from moeserve.launcher.child_process import Child
from moeserve.processes.control_groups import MemoryKills


@pytest.mark.parametrize(
    ("kills", "said"),
    [
        ((3, 0), "out of memory?"),  # the kernel killed no process: who did is not known
        ((4, 0), "memory ran out"),  # the machine's
        ((4, 1), "memory ran out, and a control group limits the server to 0.24 GiB"),
        (None, "out of memory?"),
    ],
)
def test_whether_memory_ran_out_is_told(
    monkeypatch: pytest.MonkeyPatch, kills: tuple[int, int] | None, said: str
) -> None:
    """In a container with too little memory the log asked, and named neither the limit nor its size."""
    monkeypatch.setattr(child_process, "memory_limit", lambda: 250 << 20)
    monkeypatch.setattr(child_process, "memory_kills", lambda: kills and MemoryKills(3, 0))
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {}, setpgroup=0)
    child = Child.adopt("worker", pid)
    monkeypatch.setattr(child_process, "memory_kills", lambda: kills and MemoryKills(*kills))
    child.kill()
    child_process.has_ended(child.descriptor, 10)
    assert child.cause_of_death() == f"signal 9, {signal.strsignal(signal.SIGKILL)}; {said}"
    if kills is not None:
        assert child.died_by_itself == (kills[0] > 3)
    child.close()

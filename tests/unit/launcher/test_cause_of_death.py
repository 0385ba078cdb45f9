"""What the launcher says of a process that was killed."""

from __future__ import annotations

import os
import signal

import pytest

from moeserve.launcher import child_process
from moeserve.launcher.child_process import Child


@pytest.mark.parametrize(
    ("kills", "limit", "said"),
    [
        ((3, 3), 1 << 30, "out of memory?"),  # the kernel killed no process: who did is not known
        ((3, 4), None, "memory ran out"),
        ((3, 4), 250 << 20, "memory ran out, and a control group limits the server to 0.24 GiB"),
    ],
)
def test_whether_memory_ran_out_is_told(
    monkeypatch: pytest.MonkeyPatch, kills: tuple[int, int], limit: int | None, said: str
) -> None:
    """In a container with too little memory the log asked, and named neither the limit nor its size."""
    counts = iter(kills)
    monkeypatch.setattr(child_process, "_kills_for_memory", lambda: next(counts))
    monkeypatch.setattr(child_process, "memory_limit", lambda: limit)
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {}, setpgroup=0)
    child = Child.adopt("worker", pid)
    child.kill()
    child_process.has_ended(child.descriptor, 10)
    assert child.cause_of_death() == f"signal 9, {signal.strsignal(signal.SIGKILL)}; {said}"
    child.close()

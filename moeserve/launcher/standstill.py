"""Detects hung processes that cannot answer heartbeats because they load a model, were just forked, or compute.

A process that is loading uses CPU time; one that is stopped, or waits for an unresponsive disk, uses none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeserve.launcher.child_process import ServerProcess
from moeserve.processes.process_state import state_of

# Allowed time without CPU use; a GPU driver or a network file system may block a process for a while.
STILL_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Hung:
    process: ServerProcess
    cause: str
    is_stopped: bool  # the process, or a descendant that it waits for, is stopped


@dataclass(slots=True)
class _Seen:
    """The last observation of a process and its descendants."""

    activity: tuple[float, int]
    still: int = 0  # consecutive looks without activity while it owed work
    stopped: int = 0  # consecutive looks at which it or a descendant was stopped


class Standstill:
    """Counts looks instead of seconds, so that a pause of the whole machine counts as one."""

    def __init__(self, interval_s: float, most_stopped: int) -> None:
        """`interval_s`: seconds between calls of `look`. `most_stopped`: looks for which a process may be stopped."""
        self._most_stopped = most_stopped
        self._most_still = max(STILL_S / interval_s, most_stopped)
        self._seen: dict[int, _Seen] = {}

    def look(self, owing: Iterable[ServerProcess], others: Iterable[ServerProcess]) -> list[Hung]:
        """Returns the processes that hang. owing: processes with work to finish; others: may be idle, but not
        stopped."""
        hung: list[Hung] = []
        seen: dict[int, _Seen] = {}
        for process, owes in [*((each, True) for each in owing), *((each, False) for each in others)]:
            state = seen[process.pid] = self._look_at(process.pid, owes=owes)
            if state.stopped >= self._most_stopped:
                hung.append(Hung(process, f"the {process.name} process does not answer", is_stopped=True))
            elif state.still >= self._most_still:
                cause = f"the {process.name} process has done nothing for {STILL_S:g} s"
                hung.append(Hung(process, cause, is_stopped=False))
        self._seen = seen
        return hung

    def _look_at(self, pid: int, *, owes: bool) -> _Seen:
        activity, is_stopped = _look_at(pid)
        before = self._seen.get(pid)
        if before is None:
            return _Seen(activity, stopped=int(is_stopped))
        still = before.still + 1 if owes and activity == before.activity else 0
        return _Seen(activity, still, before.stopped + 1 if is_stopped else 0)


def _look_at(pid: int) -> tuple[tuple[float, int], bool]:
    """Returns CPU seconds and context switches of a process with its descendants, and whether one of them is
    stopped."""
    seconds, switches, is_stopped = 0.0, 0, False
    for member in _family(pid):
        state = state_of(member)
        seconds += state.cpu_seconds
        is_stopped |= state.is_stopped
        switches += _switches(member)
    return (seconds, switches), is_stopped


def _family(pid: int) -> Iterator[int]:
    """Yields a process and its descendants, where the kernel lists them (proc(5), /proc/PID/task/TID/children)."""
    yield pid
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from _family(int(child))


def _switches(pid: int) -> int:
    """Returns the context switches of the process's main thread; 0 if it has ended."""
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.endswith("ctxt_switches"):
                total += int(value)
    return total

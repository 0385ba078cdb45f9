"""Detects processes that hang, by signs that depend on their state. A hung process is killed and then treated like
any other that died.

    serving       httpserver, router and detokenizer answer heartbeat requests; a worker answers its router
    starting      uses CPU time (`standstill.py`)
    forking       the process with the weights reports within the limit what became of its worker
    orphaned      a worker that lost its router listens for the next one within the limit
    any state     is not stopped (SIGSTOP)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType

from moeserve.launcher.heartbeats import MOST_MISSED, Heartbeats
from moeserve.launcher.process_table import WORKER, ProcessTable
from moeserve.launcher.standstill import Standstill


class SignsOfLife:
    def __init__(
        self,
        limit_s: float,
        processes: ProcessTable,
        ready: Container[str],
        ask: Mapping[str, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        """`limit_s`: see `processes.silence.longest_silence`. `ready`: names of the ready processes, updated by the
        caller. `ask`: by process name, a function that sends it a heartbeat request."""
        self._processes = processes
        self._ready = ready
        self._ask = ask
        self._heartbeats = Heartbeats(limit_s)
        self._standstill = Standstill(self._heartbeats.interval_s, MOST_MISSED)
        self.interval_s = self._heartbeats.interval_s  # `turn` must be called at least this often

    def answered(self, name: str) -> None:
        """Notes an answer, or that a new process took over the name."""
        self._heartbeats.answered(name)

    def turn(self) -> None:
        """Starts a new interval if the last one is over, and kills the processes that hang."""
        if not self._heartbeats.is_due:
            return
        alive = [name for name in self._ask if self._processes.is_alive(name)]
        due = [name for name in alive if name in self._ready]
        if self._processes.worker_is_left(self._ready):
            due.append(WORKER)
        asked, hung = self._heartbeats.beat(due)
        # Starting processes are asked, too: they may answer late, and the request shows them that the launcher lives.
        for name in alive:
            if name in asked or name not in self._ready:
                self._ask[name]()
        for name in hung:
            self._processes[name].give_up(f"the {name} does not answer")
        owing = self._processes.owing(self._ready)
        for each in self._standstill.look(owing, self._processes.never_stopped(self._ready)):
            each.process.give_up(each.cause, is_stopped=each.is_stopped)

"""Who gives no sign of life: asked at intervals, and killed when there is none for too long. What follows is what
follows any death.

    serves        httpserver, router and detokenizer answer a heartbeat request; a worker answers its router
    starts        uses processor time (`standstill.py`)
    has forked    the process with the weights says within that time what has become of its worker
    was left      a worker whose router was lost listens for the next within that time
    any of them   is not stopped (SIGSTOP)
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
        """`limit_s`: `processes.silence.longest_silence`. `ready`: the names of the processes that are ready; written
        by the owner. `ask` sends a heartbeat request to the process of a name."""
        self._processes = processes
        self._ready = ready
        self._ask = ask
        self._heartbeats = Heartbeats(limit_s)
        self._standstill = Standstill(self._heartbeats.interval_s, MOST_MISSED)
        self.interval_s = self._heartbeats.interval_s  # `turn` must be called as often

    def answered(self, name: str) -> None:
        """It has answered a request, or another process has this name now."""
        self._heartbeats.answered(name)

    def turn(self) -> None:
        """Begins another interval, if one has ended."""
        if not self._heartbeats.is_due:
            return
        alive = [name for name in self._ask if self._processes.is_alive(name)]
        due = [name for name in alive if name in self._ready]
        if self._processes.worker_is_left(self._ready):
            due.append(WORKER)
        asked, hung = self._heartbeats.beat(due)
        # Processes that start are asked, too: they may answer late, and know by it that the launcher lives.
        for name in alive:
            if name in asked or name not in self._ready:
                self._ask[name]()
        for name in hung:
            self._processes[name].give_up(f"the {name} does not answer")
        owing = self._processes.owing(self._ready)
        for each in self._standstill.look(owing, self._processes.never_stopped(self._ready)):
            each.process.give_up(each.cause, is_stopped=each.is_stopped)

"""Replaces processes that died while serving, and decides when that is pointless.

`ready` and `last_words` belong to the launcher; this module removes the entries of processes that it restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import msgspec

from moeserve.config import ServerConfig
from moeserve.launcher.child_process import Fork, ServerProcess
from moeserve.launcher.crash_count import CrashCount
from moeserve.launcher.process_table import (
    DETOKENIZER,
    HTTPSERVER,
    ROUTER,
    VISUALSERVER,
    WORKER,
    ProcessTable,
)
from moeserve.launcher.signs_of_life import SignsOfLife
from moeserve.messages.schema import HttpserverLost, ProcessLost, ProcessReady, WorkerExited
from moeserve.processes.begin import EXIT_NOT_IMPORTED
from moeserve.processes.lifecycle import EXIT_USER_ERROR
from moeserve.processes.runtime_paths import RuntimePaths

REQUEST_IDS_PER_HTTPSERVER = 1 << 40

log = logging.getLogger(__name__)


class Replacement:
    def __init__(
        self,
        config: ServerConfig,
        paths: RuntimePaths,
        processes: ProcessTable,
        ready: dict[str, ProcessReady],
        last_words: dict[str, str],
        signs_of_life: SignsOfLife,
        tell: Callable[[str, msgspec.Struct], None],
        log_death: Callable[[ServerProcess], None],
    ) -> None:
        """tell: sends a message to an address of `paths`."""
        self.crashes = CrashCount(config.max_engine_crashes)
        self._paths = paths
        self._processes = processes
        self._ready = ready
        self._last_words = last_words
        self._signs_of_life = signs_of_life
        self._tell = tell
        self._log_death = log_death

    def replace(self, dead: list[ServerProcess]) -> bool:
        """Replaces the dead processes. Returns False if the server has to end."""
        names = {process.name for process in dead}
        if HTTPSERVER in names:
            return self._replace_httpserver()
        if ROUTER in names:
            return self._replace_router()
        for name in (DETOKENIZER, VISUALSERVER):
            if name in names:
                return self._replace_simply(name)
        return self._replace_worker()

    def _replace_httpserver(self) -> bool:
        """Replaces httpserver, whose requests have lost their connections. Returns False if that is impossible."""
        if not self._may_try_again(self._processes[HTTPSERVER]):
            return False
        self._processes.first_request_id += REQUEST_IDS_PER_HTTPSERVER
        self._tell(self._paths.router, HttpserverLost(self._processes.first_request_id))
        self._start_again(HTTPSERVER)
        return True

    def _replace_router(self) -> bool:
        """Replaces the router. The detokenizer, which is slowest to start, stays; the new router tells it to drop
        its requests."""
        router = self._processes[ROUTER]
        if not self._may_try_again(router):
            return False
        worker = self._processes[WORKER]
        if worker.is_stopped:
            worker.give_up("the worker does not answer")  # the new router could not connect to it
        self._tell(self._paths.http, ProcessLost(ROUTER, router.cause_of_death(), router.died_by_itself))
        self._start_again(ROUTER)
        return True

    def _replace_simply(self, name: Literal["detokenizer", "visualserver"]) -> bool:
        """Replaces a process whose work httpserver can send to the new one again."""
        lost = self._processes[name]
        if not self._may_try_again(lost):
            return False
        self._tell(self._paths.http, ProcessLost(name, lost.cause_of_death(), lost.died_by_itself))
        self._start_again(name)
        return True

    def _start_again(self, name: str) -> None:
        self._ready.pop(name, None)
        self._last_words.pop(name, None)
        self._signs_of_life.answered(name)
        self._processes.replace(name)
        log.warning("another %s is started; requests wait for it", name)

    def _replace_worker(self) -> bool:
        """Replaces a worker that died, or whose weight-holding process died."""
        worker, keeper = self._processes[WORKER], self._processes.keeper
        if isinstance(worker, Fork):
            self._processes.end_with_keeper(worker)
        if keeper is not None and not keeper.alive:
            self._log_death(keeper)
        if not self._may_try_again(worker):
            return False
        self._tell(self._paths.router, WorkerExited(worker.cause_of_death(), worker.died_by_itself))
        self._ready.pop(WORKER, None)
        self._last_words.pop(WORKER, None)
        self._paths.worker.unlink(missing_ok=True)
        self._processes.replace_worker()
        log.warning("another worker is started; requests wait for it")
        return True

    def _may_try_again(self, process: ServerProcess) -> bool:
        """Counts and logs a death. Returns False if it is one too many, or a new process would fail to start as
        well."""
        self._log_death(process)
        stays = process.returncode in (EXIT_USER_ERROR, EXIT_NOT_IMPORTED)
        could_not_start = stays and process.name not in self._ready
        too_often = self.crashes.add(process.name, was_ready=process.name in self._ready)
        if could_not_start:
            log.error("the %s cannot be started again: the server ends", process.name)
        elif too_often is not None:
            log.error("%s: the server ends", too_often)
        return not could_not_start and too_often is None

"""The launcher's side of the zygote, from which routers and detokenizers are forked (`launcher/zygote/forking.py`).

The zygote only speeds up restarts. If it has died or does not answer, processes are started the ordinary way, and a
new zygote is started beside them.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import zmq

from moeserve.launcher.child_process import Child
from moeserve.processes.runtime_paths import RuntimePaths

FORK_S: Final = 2.0  # time limit for a fork, generous for a busy machine
SETTLED_S: Final = 10.0  # a zygote that died sooner is replaced only when the next fork is wanted
NAME: Final = "zygote"
MODULE: Final = "launcher.zygote"  # module, relative to the package of the server's processes

_PR_SET_CHILD_SUBREAPER: Final = 36  # <linux/prctl.h>

log = logging.getLogger(__name__)


class Zygote:
    def __init__(self, module: str, paths: RuntimePaths, poller: zmq.Poller) -> None:
        self._module = module
        self._paths = paths
        self._poller = poller
        self._child: Child | None = None
        self._is_ready = False
        self._was_lost = False

    @property
    def is_starting(self) -> bool:
        return self._child is not None and not self._is_ready

    def processes(self, *, is_starting: bool | None = None) -> list[Child]:
        """Returns a list with the living zygote, if any. is_starting: True: only if it is still starting; False:
        only if it is ready."""
        is_wanted = is_starting is None or is_starting == self.is_starting
        return [self._child] if self._child is not None and is_wanted else []

    def start(self) -> None:
        """Starts a zygote without waiting for it."""
        # Keep numpy's BLAS from starting threads, which would be missing in a fork.
        self._child = Child.spawn(
            NAME, self._module, self._paths, has_line=True, variables={"OPENBLAS_NUM_THREADS": "1"}
        )
        assert self._child.line is not None
        self._poller.register(self._child.descriptor, zmq.POLLIN)
        self._poller.register(self._child.line.fileno(), zmq.POLLIN)

    def woken_by(self, descriptors: dict[object, int]) -> None:
        """Handles the descriptors that the poller found readable. Replaces a zygote that died."""
        child = self._child
        if child is None or child.line is None:
            return
        if child.descriptor in descriptors:
            is_settled = self._is_ready and time.monotonic() - child.started > SETTLED_S
            self._lost(f"has died ({child.cause_of_death()})")
            if is_settled:
                self.start()
        elif child.line.fileno() in descriptors:
            self._is_ready = child.line.recv(64) == b"ready\n"
            if not self._is_ready:
                self._poller.unregister(child.line.fileno())  # it is ending; its pidfd reports when
            elif self._was_lost:
                log.info("the %s is back", NAME)
                self._was_lost = False

    def fork(self, name: str) -> Child | None:
        """Forks a process of this name. Returns None if the zygote cannot; the caller then starts the process
        itself."""
        child = self._child
        if child is None:
            self.start()
        if child is None or child.line is None or not self._is_ready:
            return None
        said = b""
        with suppress(OSError), _adopting():  # the zygote died, or takes too long
            child.line.settimeout(FORK_S)
            child.line.sendall(name.encode() + b"\n")
            said = child.line.recv(64)
        if said.startswith(b"started "):
            return Child.adopt(name, int(said.split()[1]))
        self._lost("did not fork")
        self.start()
        return None

    def _lost(self, how: str) -> None:
        log.warning("the %s %s; the server goes on without it for a while", NAME, how)
        self._was_lost = True
        self.close()

    def close(self) -> None:
        """Kills the zygote."""
        child, self._child, self._is_ready = self._child, None, False
        if child is None:
            return
        child.kill()
        for descriptor in (child.descriptor, *([] if child.line is None else [child.line.fileno()])):
            with suppress(KeyError):
                self._poller.unregister(descriptor)
        child.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of its descendants' orphans (PR_SET_CHILD_SUBREAPER) during the context.
    Otherwise init adopts them and reaps them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

"""The launcher's side of the zygote, from which routers and detokenizers are forked (`launcher/zygote/forking.py`).

Nothing depends on it but how fast another process is there: where it has died, or does not answer, a process is started
the ordinary way, and another zygote beside it.
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

FORK_S: Final = 2.0  # for a zygote to fork, on a machine with much to do
SETTLED_S: Final = 10.0  # one that has died earlier is replaced when a fork is wanted next
NAME: Final = "zygote"
MODULE: Final = "launcher.zygote"  # within the package of a server's processes

_PR_SET_CHILD_SUBREAPER: Final = 36  # <linux/prctl.h>

log = logging.getLogger(__name__)


class Zygote:
    def __init__(self, module: str, paths: RuntimePaths, poller: zmq.Poller) -> None:
        self._module = module
        self._paths = paths
        self._poller = poller
        self._child: Child | None = None
        self._is_ready = False

    @property
    def is_starting(self) -> bool:
        return self._child is not None and not self._is_ready

    def processes(self, *, is_starting: bool | None = None) -> list[Child]:
        """The living zygote, if any; is_starting: only if it is still starting, or only if it has started."""
        is_wanted = is_starting is None or is_starting == self.is_starting
        return [self._child] if self._child is not None and is_wanted else []

    def start(self) -> None:
        """Without waiting until it is ready."""
        # Numpy's library would start threads, which no fork has.
        self._child = Child.spawn(
            NAME, self._module, self._paths, has_line=True, variables={"OPENBLAS_NUM_THREADS": "1"}
        )
        assert self._child.line is not None
        self._poller.register(self._child.descriptor, zmq.POLLIN)
        self._poller.register(self._child.line.fileno(), zmq.POLLIN)

    def woken_by(self, descriptors: dict[object, int]) -> None:
        """Takes in what the poller has found. One that has died is replaced."""
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
                self._poller.unregister(child.line.fileno())  # it ends, as its descriptor will say

    def fork(self, name: str) -> Child | None:
        """Another process with this name; None where it has to be started the ordinary way."""
        child = self._child
        if child is None:
            self.start()
        if child is None or child.line is None or not self._is_ready:
            return None
        said = b""
        with suppress(OSError), _adopting():  # it has died, or takes too long
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
        self.close()

    def close(self) -> None:
        """Kills it."""
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
    """Meanwhile, children of a descendant that ends become this process's. At other times they are init's, which
    waits for their ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

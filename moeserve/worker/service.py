"""The worker's connection to the router: an rpyc server for one client at a time, single-threaded, exchanging bytes.

Calls are executed in the order in which they were sent, so the router may reassign a KV slot while an earlier plan that
writes to it is still on its way. The thread that answers calls also computes; between calls it sleeps in poll(2). While
it computes, the next plan waits in the socket, unless the worker runs ahead: see `PlansAhead`.

A round trip of an empty step (encode, rpyc, decode, and back) takes 80 us, of 256 decode rows 125 us (medians on two
virtual cores with rpyc 6.0).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from rpyc.core.protocol import Connection
from rpyc.core.service import Service
from rpyc.core.stream import SocketStream

from moeserve.messages import codec, rpc
from moeserve.messages.steps import WorkerError
from moeserve.messages.worker import Worker, WorkerAnswer
from moeserve.worker.plans.plans_ahead import PlansAhead

# Time without a call after which postponed work is done. A router that has just connected needs a moment for its first
# plan.
IDLE_S: Final = 0.25
# Python's thread switch interval: how long the computing thread waits for the GIL, many times per step, while another
# thread reads an adapter or compiles a grammar. Python's default is 5 ms.
SWITCH_S: Final = 2e-4

log = logging.getLogger(__name__)


class WorkerService(Service):  # type: ignore[misc]  # rpyc has no types
    """The calls of the router; each takes bytes or nothing and returns bytes."""

    def __init__(self, runner: Worker, *, outlives_routers: bool = False) -> None:
        """outlives_routers: `shutdown` does not end the worker."""
        self._runner = runner
        self._plans = PlansAhead(runner, self._take_call)
        self._connection: Connection | None = None
        self._outlives_routers = outlives_routers
        self.is_done = False
        self.error: BaseException | None = None  # of the failed call

    def exposed_hello(self) -> bytes:
        """Returns a WorkerReady."""
        return codec.encode(self._runner.ready())

    def exposed_step(self, plan: bytes) -> bytes:
        """Takes a StepPlan. Returns a StepResult, or a WorkerError, after which the worker ends."""
        return self._answer(lambda: self._plans.step(codec.STEP_PLAN.decode(plan)))

    def exposed_expert_use(self) -> bytes:
        """Waits for all earlier steps. Returns an ExpertUse, or a WorkerError, after which the worker ends."""
        return self._answer(lambda: self._plans.answer(self._runner.expert_use))

    def exposed_adapters(self, wanted: bytes) -> bytes:
        """Takes AdaptersWanted. Returns an AdaptersReport, or a WorkerError, after which the worker ends."""
        adapters, decode = self._runner.adapters, codec.ADAPTERS_WANTED.decode
        return self._answer(lambda: self._plans.answer(partial(adapters, decode(wanted))))

    def _answer(self, call: Callable[[], WorkerAnswer]) -> bytes:
        try:
            return codec.encode(call())
        except BaseException as error:  # noqa: BLE001  including panics of Rust code; `serve` raises it after the reply
            self.error = error
            self.is_done = True
            return _error_bytes(error)

    def take_calls_of(self, connection: Connection | None) -> None:
        """Sets the connection whose calls may run while a step is computed; None: no connection's."""
        self._connection = connection

    def _take_call(self) -> bool:
        """Executes a waiting call while a step is computed. Returns False if none was waiting. Raises the
        call's exception."""
        has_taken = False
        if self._connection is not None:
            try:
                has_taken = self._connection.poll(0)
            except EOFError:  # sending the step's result fails in the same way and reports it
                self._connection = None
                has_taken = True  # the call may have been executed, and its answer not sent
        if self.error is not None:
            raise self.error
        return has_taken

    def warm_on(self, *, is_idle: bool) -> bool:
        """Does a piece of postponed work between two calls; see `Worker`."""
        return self._runner.warm_on(is_idle=is_idle)

    def exposed_shutdown(self) -> bytes:
        """Ends the worker after this reply, if the router may end it."""
        self.is_done = not self._outlives_routers
        return b""


def _error_bytes(error: BaseException) -> bytes:
    return codec.encode(WorkerError(message=f"{type(error).__name__}: {error}"))


def serve(
    runner: Worker,
    path: Path,
    on_listening: Callable[[], None],
    on_router_lost: Callable[[], None],
    *,
    outlives_routers: bool = False,
) -> None:
    """Serves a router on the Unix socket `path`, in the private runtime directory, and when that router is lost, the
    next one. Calls `on_listening` when the first router can connect, and `on_router_lost` before each further one.
    Returns when a router sends shutdown, unless the worker `outlives_routers`. Tells the router of a step's exception,
    then raises it.

    A new router does not know which slots are in use: it binds each of its sequences anew.
    """
    sys.setswitchinterval(SWITCH_S)
    service = WorkerService(runner, outlives_routers=outlives_routers)
    _serve_client(service, _accept(path, on_listening))
    while not service.is_done:
        _serve_client(service, _accept(path, on_router_lost))


def _accept(path: Path, on_listening: Callable[[], None]) -> socket.socket:
    """Waits for the next router. Calls `on_listening` once the socket listens."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        on_listening()
        client, _ = listener.accept()
    path.unlink()  # no other process may connect while this client is served
    return client


def _serve_client(service: WorkerService, client: socket.socket) -> None:
    stream = SocketStream(client)
    connection = rpc.connection(service, stream)
    is_warm, wait = False, IDLE_S
    try:
        while not service.is_done:
            has_served = connection.serve(None if is_warm else wait)
            wait = IDLE_S if has_served else 0.0
            is_warm = is_warm or service.is_done or not service.warm_on(is_idle=not has_served)
            # while warm-up work is postponed, no step runs ahead
            service.take_calls_of(connection if is_warm else None)
    except EOFError:
        log.info("the router is gone; waiting for the next one")
    finally:
        service.take_calls_of(None)
        stream.close()  # connection.close() would wait for the router's answer
    if service.error is not None:
        raise service.error

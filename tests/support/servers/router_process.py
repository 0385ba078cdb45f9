"""A router in this process, between real sockets; its neighbours are the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from moeserve.messages import codec
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import (
    EngineLost,
    EngineReady,
    Shutdown,
    TokensItem,
    TokensOut,
    WorkerExited,
)
from moeserve.messages.steps import ExpertUse
from moeserve.messages.worker import WorkerClient
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.router.core.limits import Limits
from moeserve.router.core.scheduler import Scheduler
from moeserve.router.manager import RouterManager
from moeserve.router.replacement import WorkerSource
from tests.support.router.router_world import request
from tests.support.servers.rpc_child import READY

LIMITS = Limits(READY.num_kv_slots, READY.max_num_seqs, READY.max_model_len, 64, 100)


def behaving(id: int, behaviour: int, max_tokens: int) -> Any:
    """A request whose steps make `ScriptedRunner` behave so."""
    message = request(id, prompt=4, max_tokens=max_tokens)
    tokens = id.to_bytes(4, "little") + behaviour.to_bytes(4, "little") + bytes(8)
    return msgspec.structs.replace(message, token_ids=tokens)


class Neighbours:
    """The other ends of the router's sockets."""

    def __init__(self, paths: RuntimePaths) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.detokenizer = PullChannel(self.context, paths.detokenizer, codec.TO_DETOKENIZER)
        self.http = PullChannel(self.context, paths.http, codec.TO_HTTP)
        self.router = PushChannel(self.context, paths.router)

    def item(self, id: int, *, final: bool, timeout: float = 30.0) -> TokensItem:
        """The next item (or the final one) of a request; other messages are passed over."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            message = self.detokenizer.recv(left)
            for item in message.items if isinstance(message, TokensOut) else []:
                if item.id == id and (item.finish_reason is not None or not final):
                    return item
        raise AssertionError(f"nothing of request {id}")

    def next(self, kind: type, timeout: float = 30.0) -> Any:
        """The next message of a kind, from either socket."""
        inbox = self.http if kind in (LoadReport, EngineLost, EngineReady, ExpertUse) else self.detokenizer
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            message = inbox.recv(left)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__}")

    def report(self, timeout: float = 30.0, **wanted: int) -> LoadReport:
        """The first LoadReport with these gauges."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            report: LoadReport = self.next(LoadReport, deadline - time.monotonic())
            if all(getattr(report, name) == value for name, value in wanted.items()):
                return report
        raise AssertionError(f"no report with {wanted}")


class Workers(WorkerSource):
    """The workers after the first; `replaced` has what the launcher is told."""

    def __init__(self, *others: WorkerClient, router: PushChannel | None = None) -> None:
        """`router`: is told, as by the launcher, that the worker failed. The next loads until `loaded` is released."""
        self.others = list(others)
        self.loaded = threading.Semaphore(0)
        self.replaced: list[str] = []
        self._router = router

    def replace(self, pid: int, cause: str) -> None:
        self.replaced.append(cause)
        if self._router is not None:
            self._router.send(WorkerExited("exit code 1", by_itself=True))

    def connect(self) -> WorkerClient | None:
        if self._router is not None and not self.loaded.acquire(blocking=False):
            return None
        return self.others.pop(0) if self.others and self.replaced else None


def manager_of(
    paths: RuntimePaths,
    neighbours: Neighbours,
    worker: WorkerClient,
    workers: WorkerSource | None = None,
    **options: Any,
) -> RouterManager:
    inbox = PullChannel(neighbours.context, paths.router, codec.TO_ROUTER)
    detokenizer = PushChannel(neighbours.context, paths.detokenizer)
    http = PushChannel(neighbours.context, paths.http)
    worker.ready()
    return RouterManager(
        Scheduler(options.pop("limits", LIMITS)),
        worker,
        inbox,
        detokenizer,
        http,
        workers or Workers(),
        **options,
    )


@contextmanager
def running(
    paths: RuntimePaths,
    neighbours: Neighbours,
    worker: WorkerClient,
    workers: WorkerSource | None = None,
    **options: Any,
) -> Iterator[threading.Thread]:
    """A router in a thread; told to stop at the end, and asserted to."""
    thread = threading.Thread(target=manager_of(paths, neighbours, worker, workers, **options).run)
    thread.start()
    try:
        yield thread
    finally:
        neighbours.router.send(Shutdown())
        thread.join(30)
        assert not thread.is_alive()

"""The server at --health-port: on the API's event loop, with connections of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import uvicorn
from fastapi import FastAPI

from moeserve.httpserver.transport.connection import BoundedHttpProtocol
from moeserve.httpserver.transport.idle_connections import IdleConnections
from moeserve.httpserver.transport.turns import Turns
from moeserve.processes.listeners import BACKLOG

MAX_CONNECTIONS: Final = 128
LAST_BYTES_S: Final = 1  # at the end: seconds for answers that are still being written


class ProbeServer(uvicorn.Server):
    """Answers probes as long as the API's server runs, including its drain, until `should_exit`."""

    def __init__(self, app: FastAPI, is_busy: Callable[[], bool]) -> None:
        """app: the probes' application. is_busy: whether answers of the API are in progress."""
        turns = Turns(is_busy=is_busy)
        idle = IdleConnections(MAX_CONNECTIONS)
        config = uvicorn.Config(
            app,
            http=partial(BoundedHttpProtocol, idle=idle, turns=turns),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the API's server."""
        yield

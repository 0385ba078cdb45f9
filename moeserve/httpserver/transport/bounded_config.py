"""uvicorn's configuration for an API port: connections are bounded (`connection.py`) and take turns (`turns.py`)."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.httpserver.transport.connection import SPARE_DESCRIPTORS, BoundedHttpProtocol
from moeserve.httpserver.transport.idle_connections import IdleConnections
from moeserve.httpserver.transport.keys import ApiKeys
from moeserve.httpserver.transport.turns import RawHeaders, Turns
from moeserve.messages.refusal import Refusal
from moeserve.processes.listeners import BACKLOG

# How long a connection without a request is kept: longer than clients' pools keep one.
KEEP_ALIVE_S: Final = 120
# Time after the last request's end in which clients may read the rest of their answers.
LAST_BYTES_S: Final = 3
# Connections for /health, /metrics and refusals, in addition to the connections of requests.
SPARE_CONNECTIONS: Final = 256


def bounded_config(
    app: ASGIApp,
    config: ServerConfig,
    keys: ApiKeys,
    *,
    is_busy: Callable[[], bool],
    count_refusal: Callable[[Refusal], None],
    descriptors_per_request: int = 1,
) -> uvicorn.Config:
    """Returns uvicorn's configuration, with limits for connections. is_busy: whether answers are in progress.
    descriptors_per_request: file descriptors of a request, including its client's connection. Raises ConfigError for a
    bad certificate."""
    most_requests = config.max_num_queued_reqs + config.max_num_seqs
    idle = IdleConnections(config.max_idle_connections_per_address or most_requests + SPARE_CONNECTIONS // 2)
    most = most_requests + SPARE_CONNECTIONS
    if descriptors_per_request > 1:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS
        most = min(most, descriptors // descriptors_per_request)

    def is_known(headers: RawHeaders) -> bool:
        return keys.key_in(headers) is not None

    turns = Turns(is_busy=is_busy, is_known=is_known, is_open=not keys)
    made = uvicorn.Config(
        app,
        http=partial(  # type: ignore[arg-type]
            BoundedHttpProtocol, idle=idle, turns=turns, count_refusal=count_refusal
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="debug" if config.log_level == "debug" else "warning",
        access_log=False,  # `observability/access.py` writes it
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=most,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_BYTES_S,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    try:
        made.load()
    except OSError as error:  # ssl.SSLError is one
        files = f"{config.ssl_certfile}, {config.ssl_keyfile or 'the same file'}"
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {error}; give a certificate and its key as PEM"
        ) from error
    return made

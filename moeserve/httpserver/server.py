"""The process: a port that answers at once, a tokenizer built meanwhile, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
import zmq.asyncio

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.httpserver.app import build_app
from moeserve.httpserver.generation.chat_formats import formats_of
from moeserve.httpserver.generation.engine_client import EngineClient
from moeserve.httpserver.generation.model_text import ModelText
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.responses.store import ResponseStore
from moeserve.httpserver.transport.connection import BoundedHttpProtocol
from moeserve.messages.channels import AsyncPullChannel, AsyncPushChannel
from moeserve.messages.codec import TO_HTTP
from moeserve.models.source import open_metadata
from moeserve.process import Process
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer

log = logging.getLogger(__name__)

BACKLOG: Final = 2048
LAST_BYTES_S: Final = 3  # for clients to take what is written when the requests have ended
MAX_OPEN_FILES: Final = 65536
SPARE_CONNECTIONS: Final = 256  # for /health, /metrics and refusals beside the requests


async def serve(process: Process) -> None:
    """Runs until SIGTERM and the drain that follows it. Raises ConfigError when the port cannot be had,
    ModelError or TemplateError when the model's tokenizer or template cannot be used."""
    config = process.config
    listener = listen(config.host, config.port)
    responses = ResponseStore(None if config.data_dir is None else Path(config.data_dir))
    _allow_open_files()
    context = zmq.asyncio.Context(process.context)
    inbox = AsyncPullChannel(context, process.paths.http, TO_HTTP)
    to_router = AsyncPushChannel(context, process.paths.router)
    metrics = Metrics(config.served_model_name or Path(config.model).stem)
    engine = EngineClient(to_router, inbox, metrics, process.tracer)
    service = Service(config, metrics.model_name, engine, metrics, responses)
    server = Server(service)
    try:
        await server.run(listener, process)
    finally:
        responses.close()
        to_router.close()
        inbox.close()


def listen(host: str, port: int) -> socket.socket:
    """The API's socket; port 0 takes a free one. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use: choose another with --port") from error
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}, port {port} (--host, --port): {reason}") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_open_files() -> None:
    """A connection is an open file; the usual soft limit of 1024 is less than the queue holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Server(uvicorn.Server):
    """uvicorn, with our idea of SIGTERM and of what ends it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.listening = asyncio.Event()
        super().__init__(_uvicorn_config(service))
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    async def run(self, listener: socket.socket, process: Process) -> None:  # type: ignore[override]
        """Serves; a failure of a task beside it ends the server and is raised here."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        self._beside(self.service.engine.run())
        self._beside(self._load(process, url_of(listener)))
        try:
            await self.serve(sockets=[listener])
            await self.service.engine.flush()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            if self.service.text is not None:
                await asyncio.to_thread(self.service.text.renderer.close)
            await asyncio.to_thread(self.service.grammars.close)
        if self._failure is not None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM is ours and SIGINT the launcher's; uvicorn would end running requests on either."""
        yield

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._one_ended)
        self._tasks.append(task)

    def _one_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.should_exit = self.force_exit = True

    async def _load(self, process: Process, url: str) -> None:
        """Builds the tokenizer, then reports ready: /health answers before, and goes on saying "loading"
        until the engine is ready as well."""
        self.service.text = await asyncio.to_thread(load_text, process.config)
        self.service.engine.text_ready = True
        await self.listening.wait()
        process.ready(url=url)

    def _stop(self) -> None:
        """SIGTERM, once or several times: a signal to the whole group comes beside the launcher's."""
        if not self.service.engine.draining:
            self.service.engine.draining = True
            log.info("draining: no new requests")
            self._beside(self._drain())

    async def _drain(self) -> None:
        await self.service.engine.drain(self.service.config.shutdown_timeout)
        self.should_exit = True


def load_text(config: ServerConfig) -> ModelText:
    """Raises ModelError, TemplateError, ConfigError."""
    gguf = open_metadata(Path(config.model))
    tokenizer = TextTokenizer.from_gguf(gguf)
    renderer = ChatRenderer.from_gguf(gguf, tokenizer.vocabulary)
    try:
        return ModelText.of(tokenizer, renderer, formats_of(config, tokenizer, renderer.source))
    except ConfigError:
        renderer.close()
        raise


def _uvicorn_config(service: Service) -> uvicorn.Config:
    config = service.config
    return uvicorn.Config(
        build_app(service),
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="debug" if config.log_level == "debug" else "warning",
        access_log=False,  # `access.py` does it
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=config.max_num_queued_reqs + config.max_num_seqs + SPARE_CONNECTIONS,
        timeout_graceful_shutdown=LAST_BYTES_S,
    )

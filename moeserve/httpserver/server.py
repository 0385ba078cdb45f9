"""The process: it listens at once, builds the tokenizer meanwhile, and drains at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
import zmq.asyncio
from fastapi import FastAPI

from moeserve.config import ServerConfig
from moeserve.config.speculative import num_drafts
from moeserve.errors import ConfigError
from moeserve.httpserver.app import APIS, build_app, build_probe_app
from moeserve.httpserver.batches.line_request import LineAnswerer
from moeserve.httpserver.batches.model_lines import ModelLines
from moeserve.httpserver.batches.queries import batch_store
from moeserve.httpserver.batches.runner import BatchRunner
from moeserve.httpserver.generation.chat.chat_formats import formats_of
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.chat.picture_tokens import PictureTokens
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.generation.engine.picture_client import PictureClient
from moeserve.httpserver.generation.engine.queue_room import QueueRoom
from moeserve.httpserver.generation.engine.silences import Silences
from moeserve.httpserver.generation.request.sampling_defaults import SamplingDefaults, sampling_defaults
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.ollama.pulls import Pulls
from moeserve.httpserver.probe_server import ProbeServer
from moeserve.httpserver.responses.routes import background_responses
from moeserve.httpserver.transport.api_table import Api, ApiTable
from moeserve.httpserver.transport.bounded_config import bounded_config
from moeserve.httpserver.transport.hosts import is_loopback
from moeserve.messages.adapters import ServedAdapter
from moeserve.messages.async_channels import AsyncPullChannel, AsyncPushChannel
from moeserve.messages.codec import TO_HTTP
from moeserve.messages.schema import EngineReadyRequest
from moeserve.models.adapters.modules import DEFAULT_MOST, parse_modules
from moeserve.models.errors import ModelError
from moeserve.models.facts import facts_of
from moeserve.models.open import open_metadata
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.lifecycle import Process
from moeserve.processes.listeners import Listeners, open_listeners, url_of
from moeserve.tokenizer.fill_in_middle import FimTokens
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer

log = logging.getLogger(__name__)

# Seconds to wait for the first request of a connection accepted just before another server takes over.
FIRST_BYTES_S: Final = 1.0
READY_INTERVAL_S: Final = 0.02  # between two checks


async def serve(process: Process, apis: Iterable[Api] = APIS) -> None:
    """Serves until SIGTERM and the drain that follows it. Raises ConfigError if the port or an API's state cannot be
    opened, ModelError or TemplateError if the model's tokenizer or template cannot be used."""
    config = process.config
    listeners = open_listeners(config)  # the launcher's sockets, unless this process runs alone
    if (
        config.uds is None
        and not is_loopback(config.host)
        and not config.api_key
        and config.api_key_file is None
    ):
        log.warning(
            "whoever reaches %s may use this server: there is no --api-key and no --api-key-file", config.host
        )
    table = ApiTable(apis)
    states = table.open_states(config)
    context = zmq.asyncio.Context(process.context)
    inbox = AsyncPullChannel(context, process.paths.http, TO_HTTP)
    to_router = AsyncPushChannel(context, process.paths.router)
    name, *aliases = (config.served_model_name or Path(config.model).stem).split(",")
    most_adapters = 0 if config.lora_dir is None else config.max_loras or DEFAULT_MOST
    metrics = Metrics(
        name,
        config.kv_events_block_size,
        config.kv_cache_dtype,
        most_adapters,
        process.paths.directory,
        most_drafts=num_drafts(config),
    )
    engine = EngineClient(
        to_router,
        inbox,
        metrics,
        process.tracer,
        continue_requests=config.on_engine_loss == "continue",
        request_timeout=config.request_timeout,
        first_id=process.first_request_id,
        heartbeat=process.heartbeat,
        state=EngineState(silences=Silences(process.launcher)),
        room=QueueRoom(config.max_num_queued_reqs),
    )
    if config.mmproj is not None:
        to_visualserver = AsyncPushChannel(context, process.paths.visualserver)
        files = EmbeddingFiles(process.paths.spans)
        from moeserve.httpserver.generation.engine.picture_fetcher import PictureFetcher  # imports aiohttp

        fetcher = PictureFetcher(config.allowed_media_domains)
        engine.pictures = PictureClient(to_visualserver, files, fetcher, metrics.picture)
    service = Service(
        config,
        metrics.model_name,
        engine,
        metrics,
        states,
        frozenset(aliases),
    )
    modules = parse_modules(config.lora_modules)  # /v1/models lists them even while the engine is loading
    engine.adapters.told(ServedAdapter(name, path, "") for name, path in modules.items())
    server = Server(service, table)
    try:
        # The engine may have reported to an earlier httpserver only.
        await to_router.send(EngineReadyRequest())
        await server.run(listeners, process)
    finally:
        for state in states.values():
            state.close()
        to_router.close()
        if engine.pictures is not None:
            engine.pictures.close()
        inbox.close()


class Server(uvicorn.Server):
    """Runs uvicorn, with a drain on SIGTERM and with tasks whose failure ends it."""

    def __init__(self, service: Service, apis: ApiTable) -> None:
        self.service = service
        self.listening = asyncio.Event()
        app = build_app(service, apis.apis)
        super().__init__(_uvicorn_config(app, service))
        self._pulls: Pulls = app.state.pulls
        self._batches: asyncio.Task[None] | None = None
        self._runner: BatchRunner | None = None
        if (store := batch_store(service)) is not None:
            answerer = LineAnswerer(app, apis.batched, apis.error_body)
            self._runner = BatchRunner(ModelLines(service, answerer), store)
        self._tasks: list[asyncio.Task[None]] = []
        self.probes = ProbeServer(build_probe_app(service), lambda: not service.engine.room.is_empty)
        self._probing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def run(self, listeners: Listeners, process: Process) -> None:  # type: ignore[override]
        """Serves. The failure of a background task ends the server and is raised here."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGUSR1, self._leave)
        loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        self._start_task(self.service.engine.run())
        state = self.service.engine.state
        self._start_task(state.silences.watch(lambda: state.is_lost))
        if self._runner is not None:
            self._batches = self._start_task(self._runner.run())
        self._start_task(
            self._load(process, url_of(listeners.api[0], "https" if self.config.is_ssl else "http"))
        )
        try:
            if process.listens_when_ready:
                await self._until_ready()
            if not self.should_exit:
                if listeners.health is not None:
                    self._probing = self._start_task(self.probes.serve(sockets=[listeners.health]))
                await self.serve(sockets=[*listeners.api])
                if self._failure is None:
                    await background_responses(self.service).finish()
                await self.service.engine.flush()
        finally:
            await self._end_probes()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            if self.service.text is not None:
                await asyncio.to_thread(self.service.text.renderer.close)
            await asyncio.to_thread(self.service.grammars.close)
            await asyncio.to_thread(self.service.pdfs.close)
        if self._failure is not None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's signal handlers, which would end running requests. SIGTERM is handled here, SIGINT by the
        launcher."""
        yield

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.should_exit = self.force_exit = True

    async def _end_probes(self) -> None:
        """Waits for answers that are still being written at --health-port."""
        self.probes.should_exit = True
        if self._probing is not None:
            await asyncio.wait([self._probing])

    async def _load(self, process: Process, url: str) -> None:
        """Builds the tokenizer, then reports ready. /health answers from the start: it says "loading" until both the
        tokenizer and the engine are ready."""
        self.service.text, self.service.sampling_defaults = await asyncio.to_thread(load_text, process.config)
        self.service.engine.state.text_ready = True
        await self.listening.wait()
        process.ready(url=url)

    def _stop(self) -> None:
        """Handles SIGTERM, which may come twice: from the launcher, and as a signal to the whole process group."""
        state = self.service.engine.state
        if not state.leaving:
            state.leaving = True
            self._stop_batches()
            self._pulls.close()
            self._start_task(self._drain())

    def _leave(self) -> None:
        """Handles SIGUSR1: another server has begun to accept connections at the same sockets."""
        self._stop_batches()
        self._start_task(self._hand_over())

    def _stop_batches(self) -> None:
        """Stops working on batches, without waiting for their open requests: the next server answers them."""
        if self._batches is not None:
            self._batches.cancel()

    async def _hand_over(self) -> None:
        log.info("another server takes the new connections; this one ends when its own have")
        for server in self.servers:
            server.close()
        self.probes.should_exit = True
        await asyncio.sleep(FIRST_BYTES_S)
        self.config.timeout_graceful_shutdown = None
        self.should_exit = True

    async def _until_ready(self) -> None:
        state = self.service.engine.state
        while (state.ready is None or not state.text_ready) and not self.should_exit:
            await asyncio.sleep(READY_INTERVAL_S)

    def _reload_keys(self) -> None:
        """Handles SIGHUP."""
        config, keys = self.service.config, self.service.keys
        if config.api_key_file is None or keys is None:
            log.info("SIGHUP: there is no --api-key-file to read again")
            return
        try:
            keys.reload(config)
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("the keys were read again from %s", config.api_key_file)

    async def _drain(self) -> None:
        if self.service.config.drain_delay:
            log.info("not ready any more; requests are taken for %g s", self.service.config.drain_delay)
            await asyncio.sleep(self.service.config.drain_delay)
        self.service.engine.state.draining = True
        log.info("draining: no new requests")
        await self.service.engine.drain(self.service.config.shutdown_timeout)
        self.should_exit = True


def load_text(config: ServerConfig) -> tuple[ModelText, SamplingDefaults]:
    """Returns the tokenizer with its chat template, and the sampling defaults. Raises ModelError, TemplateError,
    ConfigError."""
    gguf = open_metadata(Path(config.model))
    defaults = sampling_defaults(config, gguf.metadata)
    tokenizer = TextTokenizer.from_gguf(gguf)
    if tokenizer.missing_bytes:
        lacking = " ".join(f"{byte:#04x}" for byte in sorted(tokenizer.missing_bytes))
        log.info(
            "the vocabulary has no token for these bytes; characters with them are replaced: %s", lacking
        )
    template = _template_of(config)
    try:
        renderer = ChatRenderer.from_gguf(gguf, tokenizer.vocabulary, template=template)
    except ModelError as error:
        if template is None:
            raise
        raise ConfigError(f"--chat-template: {config.chat_template}: {error}") from error
    try:
        formats = formats_of(config, tokenizer, *renderer.sources).probed(renderer)
        log.info("chat format: tool calls %s, reasoning %s", *formats.names())
        parses = config.control_tokens_in_text == "parse"
        facts = facts_of(gguf)
        pictures = None if config.mmproj is None else PictureTokens.of(tokenizer, renderer)
        text = ModelText.of(
            tokenizer,
            renderer,
            formats,
            parses_user_text=parses,
            facts=facts,
            pictures=pictures,
            fim=FimTokens.from_gguf(gguf, tokenizer.vocabulary),
        )
        return text, defaults
    except ConfigError:
        renderer.close()
        raise


def _template_of(config: ServerConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template: {config.chat_template} is not UTF-8: {error}") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not Path(config.chat_template).suffix:
            raise ConfigError(
                f"--chat-template: there is no file {config.chat_template}; give the path of a template, or leave the "
                "flag out to use the model's own"
            ) from error
        raise ConfigError(
            f"--chat-template: {config.chat_template} cannot be read: {error.strerror}; correct the path or its rights"
        ) from error


def _uvicorn_config(app: FastAPI, service: Service) -> uvicorn.Config:
    assert service.keys is not None, "`build_app` has read them"
    return bounded_config(
        app,
        service.config,
        service.keys,
        is_busy=lambda: not service.engine.room.is_empty,
        count_refusal=service.metrics.refused,
    )

"""The front process. It listens at once, loads models when requests need them, and drains before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.front.adapters import LoadedAdapters
from moeserve.front.app import FrontApplication, FrontProbes
from moeserve.front.batch_lines import FrontLines
from moeserve.front.config import FrontConfig
from moeserve.front.downloaded import DownloadedModels
from moeserve.front.file_looks import FileLooks
from moeserve.front.instance import Processes, ServerInstance
from moeserve.front.memory import Held, Memory
from moeserve.front.memory_share import NOTHING, MemoryShare
from moeserve.front.metrics import FrontMetrics
from moeserve.front.needs import NeedsReader
from moeserve.front.pool import ModelPool
from moeserve.httpserver.batches import open_store
from moeserve.httpserver.batches.runner import BatchRunner
from moeserve.httpserver.probe_server import ProbeServer
from moeserve.httpserver.transport.bounded_config import bounded_config
from moeserve.httpserver.transport.hosts import is_loopback
from moeserve.httpserver.transport.keys import ApiKeys
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.processes.lifecycle import Process
from moeserve.processes.listeners import Listeners, open_listeners, url_of
from moeserve.processes.resident_memory import COMMON_BYTES, LIBRARIES_BYTES
from moeserve.processes.silence import beat_interval

SPARE_SHARE: Final = 0.05  # share of the free memory that models do not get by default
DEFAULT_LOAD_TIMEOUT_S: Final = 300.0
# Seconds that a leaving server waits before it closes idle connections, so that clients that have just connected can
# send their first bytes.
FIRST_BYTES_S: Final = 1.0
# Seconds between two reads of the memory that other fronts hold, and two reports of this front's.
SHARE_LOOK_S: Final = 0.1

log = logging.getLogger(__name__)


async def serve(process: Process) -> None:
    """Serves until SIGTERM and the drain that follows it. Raises ConfigError."""
    config = process.config
    front = FrontConfig.read(process.paths.directory)
    listeners = open_listeners(config)
    if config.uds is None and not is_loopback(config.host) and not (config.api_key or config.api_key_file):
        log.warning(
            "whoever reaches %s may use this server: there is no --api-key and no --api-key-file", config.host
        )
    looks = FileLooks()
    reader = NeedsReader(0)  # 0 until the earlier server has ended and the free memory is known
    pool = ModelPool(
        front.models,
        Processes(process.paths, reader, looks),
        Memory(0),
        load_timeout=config.model_load_timeout or DEFAULT_LOAD_TIMEOUT_S,
        idle_limit=config.model_idle_timeout,
        max_waiting=config.max_num_queued_reqs,
    )
    pool.may_load.clear()
    shared = process.paths.shared_directory
    folder = shared if front.template.data_dir is None else Path(front.template.data_dir)
    downloaded = DownloadedModels(pool, front, folder)
    metrics = FrontMetrics(pool, process.paths.directory)
    adapters = LoadedAdapters(pool, shared)
    server = Server(pool, config, metrics, downloaded, adapters, reader, looks)
    await server.run(listeners, process)


def _ram_budget(config: ServerConfig) -> int:
    """Returns the bytes of RAM that all loaded models together may use, not counting memory that they share."""
    if config.models_memory is not None:
        return max(0, int(config.models_memory * GIB) - COMMON_BYTES)
    # The front's own memory is not free any more, so it is not subtracted.
    return max(0, int(available_bytes() * (1 - SPARE_SHARE)) - LIBRARIES_BYTES)


class Server(uvicorn.Server):
    """The front's uvicorn server, which drains on SIGTERM."""

    def __init__(
        self,
        pool: ModelPool,
        config: ServerConfig,
        metrics: FrontMetrics,
        downloaded: DownloadedModels,
        adapters: LoadedAdapters,
        reader: NeedsReader,
        looks: FileLooks,
    ) -> None:
        """Raises ConfigError for a bad file of API keys, a bad certificate or a --batch-dir that cannot be used."""
        self._pool = pool
        self._front = config
        self._reader = reader
        self._keys = ApiKeys.from_config(config)
        self._metrics = metrics
        store = open_store(config)
        self._app = FrontApplication(
            pool, config, self._keys, self._metrics, downloaded, adapters, store, looks
        )
        self._batches: asyncio.Task[None] | None = None
        self._runner: BatchRunner | None = None
        if store is not None:
            lines = FrontLines(pool, self._app.apis, self._keys, self._metrics, config.max_num_seqs)
            self._runner = BatchRunner(lines, store)
        self._probes = ProbeServer(
            FrontProbes(self._app, config, self._metrics), lambda: pool.num_running > 0
        )
        self._listening = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._beating: asyncio.Task[None] | None = None
        self._share: MemoryShare | None = None
        # Follow what earlier fronts hold, and tell what this one does.
        self._sharing: list[asyncio.Task[None]] = []
        super().__init__(
            bounded_config(
                self._app,
                config,
                self._keys,
                is_busy=lambda: pool.num_running > 0,
                count_refusal=self._metrics.refused,
                descriptors_per_request=2,
            )
        )

    async def run(self, listeners: Listeners, process: Process) -> None:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        loop.add_signal_handler(signal.SIGUSR1, self._leave)
        probing: asyncio.Task[None] | None = None
        beginning = asyncio.create_task(self._begin(process, listeners))
        if self._runner is not None:
            self._batches = asyncio.create_task(self._runner.run())
            self._batches.add_done_callback(self._task_ended)
        try:
            if listeners.health is not None:
                probing = asyncio.create_task(self._probes.serve(sockets=[listeners.health]))
            await self.serve(sockets=[*listeners.api])
        finally:
            beginning.cancel()
            if self._batches is not None:
                self._batches.cancel()
                await asyncio.wait((self._batches,))
            if self._beating is not None:
                self._beating.cancel()
            await self._pool.close()
            for sharing in self._sharing:
                sharing.cancel()
            self._probes.should_exit = True
            if probing is not None:
                await asyncio.wait((probing,))
            await asyncio.wait((beginning,))
        for task in (beginning, self._batches, self._leaving):
            if task is None or not task.done() or task.cancelled():
                continue
            if (error := task.exception()) is not None:
                raise error

    async def _begin(self, process: Process, listeners: Listeners) -> None:
        await self._listening.wait()
        url = url_of(listeners.api[0], "https" if self.config.is_ssl else "http")
        process.ready(url=url)
        self._beating = asyncio.create_task(_beat(process, self._metrics))
        self._share = MemoryShare(process.paths.shared_directory)
        held = await self._until_shared(self._share)
        ram = _ram_budget(self._front)
        if self._front.models_memory is None and held.ram_budget is not None:
            ram = held.ram_budget  # what is free now lacks what the earlier front holds
        self._reader.ram, self._reader.gpus = ram, held.gpus
        self._pool.budget = Memory(ram)
        self._pool.limit = limit_note() if self._front.models_memory is None else ""
        self._pool.others_hold(held.memory, held.folders)
        self._pool.may_load.set()
        if held != NOTHING:
            self._sharing.append(asyncio.create_task(self._follow(self._share)))
        log.info(
            "%d models share %.2f GiB of RAM%s",
            len(self._pool.models),
            ram / GIB,
            self._pool.limit,
        )
        await self._pool.measure_all()

    async def _until_shared(self, share: MemoryShare) -> Held:
        """Waits until no earlier front loads models. Returns what earlier ones still hold."""
        is_told = False
        while (held := share.held_by_earlier()) is None:
            if not is_told:
                log.info("models are loaded when the server before this one loads no more")
                is_told = True
            await asyncio.sleep(SHARE_LOOK_S)
        return held

    async def _follow(self, share: MemoryShare) -> None:
        """Gives the pool the memory that earlier fronts free."""
        held = None
        while held != NOTHING:
            await asyncio.sleep(SHARE_LOOK_S)
            held = share.held_by_earlier() or held
            if held is not None:
                self._pool.others_hold(held.memory, held.folders)

    async def _tell(self, share: MemoryShare) -> None:
        """Tells the next front the memory that this one holds, until this process ends."""
        while True:
            if (held := self._pool.held) is not None:
                share.publish(held)
            await asyncio.sleep(SHARE_LOOK_S)

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        self._listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's signal handlers, which would end running requests."""
        yield

    def _stop(self) -> None:
        """Handles SIGTERM, which may come twice, and after SIGUSR1."""
        if not self._is_stopping:
            self._is_stopping = True
            self._begin_to_leave(self._drain())

    def _leave(self) -> None:
        """Handles SIGUSR1: another server has begun to accept connections at the same sockets."""
        if self._leaving is None:
            self._begin_to_leave(self._hand_over())

    def _begin_to_leave(self, work: Coroutine[Any, Any, None]) -> None:
        self._leaving = asyncio.create_task(work)
        self._leaving.add_done_callback(self._task_ended)

    def _stop_batches(self) -> None:
        """Stops working on batches, without waiting for their open lines: the next server answers these lines."""
        if self._batches is not None:
            self._batches.cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Ends the server if its batches, or its leaving, have failed; `run` raises the error."""
        if not task.cancelled() and task.exception() is not None:
            self.should_exit = self.force_exit = True

    async def _hand_over(self) -> None:
        log.info("another server takes the new connections; this one ends when its own have")
        self._app.state.pulls.close()
        self._stop_batches()
        for server in self.servers:
            server.close()
        self._probes.should_exit = True
        self._pool.leave()
        await asyncio.sleep(FIRST_BYTES_S)
        if self._share is not None:
            self._sharing.append(asyncio.create_task(self._tell(self._share)))
        self.config.timeout_graceful_shutdown = None
        self.should_exit = True

    async def _drain(self) -> None:
        if self._front.drain_delay:
            log.info("not ready any more; requests are taken for %g s", self._front.drain_delay)
            await asyncio.sleep(self._front.drain_delay)
        self._app.state.pulls.close()
        self._stop_batches()
        log.info("draining: no new requests")
        await self._pool.drain(self._front.shutdown_timeout)
        self.should_exit = True

    def _reload_keys(self) -> None:
        """Handles SIGHUP, for the models' servers too."""
        if self._front.api_key_file is None:
            log.info("SIGHUP: there is no --api-key-file to read again")
            return
        try:
            self._keys.reload(self._front)
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
            return
        log.info("the keys were read again from %s", self._front.api_key_file)
        for model in self._pool.models:
            if isinstance(model.instance, ServerInstance):
                model.instance.reload_keys()


async def _beat(process: Process, metrics: FrontMetrics) -> None:
    """Tells the launcher regularly that the event loop is alive, resumes it if it was stopped, and keeps the
    counters."""
    while True:
        process.heartbeat()
        process.launcher.resume_stopped()
        metrics.keep()
        await asyncio.sleep(beat_interval(process.config))

"""One model's server, from the front's side: a process that the front starts and stops, and a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import secrets
import shutil
import signal
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import orjson
from aiohttp.connector import Connection

from moeserve.config import (
    ADAPTERS_FILE_ENV,
    FRONT_SECRET_ENV,
    LOGGED_MODEL_ENV,
    MODEL_PLACE_ENV,
    to_json_dict,
)
from moeserve.front.adapters import adapters_file
from moeserve.front.file_looks import DEADLINE_S, FileLooks
from moeserve.front.gpus import visible_gpus
from moeserve.front.model_files import Versions, versions_of
from moeserve.front.model_launcher import CONFIG_FILE, FAILURE_FILE, SOCKET, folder_of
from moeserve.front.needs import NeedsReader
from moeserve.front.pooled_model import Instance, LoadFailed, Needs, PooledModel
from moeserve.launcher.child_process import Child
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.processes.silence import beat_interval, longest_silence

MODULE: Final = "moeserve.front.model_launcher"
LOOK_S: Final = 0.05  # between two requests for a load's progress
PROBE_S: Final = 5.0  # at most, between two looks at whether a loaded server answers
# As many longest silences a server may answer nothing: its own processes notice within three that another one hangs.
MOST_SILENCES: Final = 4
ANSWER_S: Final = 5.0  # time limit for an answer to either request
LAST_BYTES_S: Final = 1.0  # for what a server has sent before its end to be read
MAX_FAILURE_BYTES: Final = 4096
# Time for a launcher to stop its processes, in addition to the requests' own time.
STOP_MARGIN_S: Final = 25.0

log = logging.getLogger(__name__)


class ServerInstance(Instance):
    """A running server of one model. `session` connects only to this server. `secret` proves to the server that a
    request comes from the front."""

    def __init__(self, model: PooledModel, paths: RuntimePaths) -> None:
        """Raises LoadFailed."""
        self._name = model.name
        self._folder = folder_of(paths.directory, model.place)
        self.secret = secrets.token_hex(32)
        self._stop_s = model.served.config.shutdown_timeout + STOP_MARGIN_S
        try:
            self._prepare(model)
            variables = {MODEL_PLACE_ENV: str(model.place), LOGGED_MODEL_ENV: model.name}
            variables[FRONT_SECRET_ENV] = self.secret
            variables |= visible_gpus(os.environ, model.gpus)
            variables[ADAPTERS_FILE_ENV] = str(adapters_file(paths.shared_directory, model))
            self._child = Child.spawn("model", MODULE, paths, variables=variables)
        except OSError as error:
            raise LoadFailed(str(error)) from error
        self.is_answering = self.died_by_itself = True
        self._probe_s = min(PROBE_S, beat_interval(model.served.config))
        self._silence_s = longest_silence(model.served.config.step_timeout)
        self._began = time.monotonic()
        self._most_silent_s = math.inf  # known when it is ready
        self._watching: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._child.descriptor, self._on_end)
        self._connect(self._folder / SOCKET)

    def _connect(self, socket: Path) -> None:
        # Each connection is closed after its answer. Otherwise the next request could be sent on a connection that the
        # server is closing as idle.
        connector = aiohttp.UnixConnector(str(socket), limit=0, force_close=True)
        self._answers: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()
        self.session = aiohttp.ClientSession(
            connector=connector,
            response_class=_noted_in(self._answers),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=1 << 18,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )

    def _prepare(self, model: PooledModel) -> None:
        """Writes the configuration for this start."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        assert model.needs is not None
        config = dataclasses.replace(
            model.served.config, uds=str(self._folder / SOCKET), **model.needs.overrides
        )
        if model.gpus:  # it sees no others
            config = dataclasses.replace(config, gpus=str(len(model.gpus)))
        path = self._folder / CONFIG_FILE
        path.touch(0o600)
        path.write_bytes(msgspec.json.encode(to_json_dict(config)))

    def _on_end(self) -> None:
        self._loop.remove_reader(self._child.descriptor)
        self.died_by_itself = self._child.died_by_itself
        self._ended.set()

    async def until_ready(self, tell: Callable[[str, float], None]) -> None:
        while not self._ended.is_set():
            health = await self._health()
            if health.get("status") == "ok":
                self._most_silent_s = most_silent_s(self._silence_s, time.monotonic() - self._began)
                self._watching = asyncio.create_task(self._watch())
                return
            tell(str(health.get("stage", "starting")), float(health.get("fraction", 0.0)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._ended.wait()
        raise LoadFailed(self._cause(), is_crash=not self._said())

    async def _watch(self) -> None:
        """Looks at whether the server answers, and kills it if it has answered nothing for too long: then none of its
        processes has resumed or replaced the others."""
        silent_s = 0.0
        while True:
            await asyncio.sleep(self._probe_s)
            began = time.monotonic()
            is_answering = bool(await self._health())
            if self.is_answering and not is_answering:
                log.warning("the server of %s does not answer", self._name)
            self.is_answering = is_answering
            # One look counts at most that much: a longer gap means that this process itself was stopped.
            counted = min(self._probe_s + time.monotonic() - began, self._probe_s + ANSWER_S)
            silent_s = 0.0 if is_answering else silent_s + counted
            if silent_s >= self._most_silent_s:
                self._child.give_up(f"it has answered nothing for {silent_s:.0f} s")

    async def is_ready(self) -> bool:
        return (await self._health()).get("status") == "ok"

    async def _health(self) -> dict[str, str]:
        """Returns /health's answer; {} while the server does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S), self.session.get("http://localhost/health") as answer:
                found = orjson.loads(await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    async def until_ended(self) -> str:
        await self._ended.wait()
        return self._cause()

    def _cause(self) -> str:
        """Returns the first error that the launcher logged; without one, a text that says how the process ended."""
        return self._said() or self._child.cause_of_death()

    def _said(self) -> str:
        try:
            with (self._folder / FAILURE_FILE).open("rb") as file:
                return file.read(MAX_FAILURE_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    def reload_keys(self) -> None:
        if self._child.alive:
            self._child.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._child.alive:
            self._child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_s):
                await self._ended.wait()
        except TimeoutError:
            log.error("the server of %s did not stop in time and is killed", self._name)
            self._child.kill()
        await self._disconnect()
        self._loop.remove_reader(self._child.descriptor)
        await asyncio.to_thread(self._child.close)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _disconnect(self) -> None:
        """Ends the answers that a server has not finished, and closes the session."""
        deadline = time.monotonic() + LAST_BYTES_S
        while self._unfinished() and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S / 10)
        # aiohttp would leave their readers waiting for ever: it forgets answers when it closes their connections.
        for answer in self._unfinished():
            answer.content.set_exception(aiohttp.ServerDisconnectedError())
        await self.session.close()

    def _unfinished(self) -> list[aiohttp.ClientResponse]:
        return [one for one in self._answers if not one.closed and one.content.exception() is None]


def most_silent_s(silence_s: float, load_s: float) -> float:
    """Returns for how many seconds a loaded server may answer nothing: until its processes have noticed that one of
    them hangs (silence_s: the longest silence of each), and its next one has started, which takes no longer than the
    load of the whole server did (load_s)."""
    return MOST_SILENCES * silence_s + load_s


def _noted_in(answers: weakref.WeakSet[aiohttp.ClientResponse]) -> type[aiohttp.ClientResponse]:
    class Noted(aiohttp.ClientResponse):
        async def start(self, connection: Connection) -> aiohttp.ClientResponse:
            started = await super().start(connection)
            answers.add(self)
            return started

    return Noted


class Processes:
    """Starts the processes for the pool: implements `Surroundings`."""

    def __init__(self, paths: RuntimePaths, reader: NeedsReader, looks: FileLooks) -> None:
        self._paths = paths
        self._reader = reader
        self._looks = looks

    async def measure(self, model: PooledModel) -> Needs:
        served = model.served
        path = Path(served.config.model)
        # A name of the hub, which has no path yet, is looked up by the reader.
        if path.is_absolute() and await self.signature(model) is None:
            if not served.is_resolved:
                raise LoadFailed(f"{path.name} is not there; it is served as soon as it is")
            again = ", or download it again" if served.is_downloaded else ""
            raise LoadFailed(f"its file {path.name} is not there any more; put it back{again}")
        return await self._reader.read(served.config, is_resolved=served.is_resolved)

    async def signature(self, model: PooledModel) -> Versions | None:
        config = model.served.config
        try:
            return await self._looks.look(("versions", model.place), partial(versions_of, config))
        except TimeoutError:
            file = Path(config.model).name
            reason = f"the file system of its file {file} does not answer within {DEADLINE_S:g} s"
            raise LoadFailed(reason) from None

    def start(self, model: PooledModel) -> ServerInstance:
        return ServerInstance(model, self._paths)

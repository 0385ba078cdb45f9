"""Pulls: downloads that clients of Ollama's API ask for, each in a process of its own (`cli/models/hub_requests.py`).

Clients that ask for the same model follow one download. The download ends when the last of these clients leaves. The
downloaded part is kept, and the next download of the model continues from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final, Protocol

import orjson

from moeserve.config import LAUNCHER_PID_ENV
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.refusal import Refusal
from moeserve.processes.lifecycle import python_environment

MODULE: Final = "moeserve.cli.models.hub_requests"
MAX_PULLS: Final = 2  # different models at once
DELETE_S: Final = 60.0
# HTTP status by the program's kind of error.
_STATUS: Final = {"name": 400, "absent": 404, "served": 409, "hub": 502}
_CLOSED: Final = "the server is shutting down; pull again to go on"


class DownloadedModels(Protocol):
    """The server's side of downloads and deletions."""

    def require_room(self, name: str) -> None:
        """Raises ApiError if the server could not take one more model."""

    def come(self, name: str, path: str) -> None:
        """Called after a model was downloaded. name: the model's name in the Hub; path: its GGUF file or folder."""

    def gone(self, path: str) -> None:
        """Called after a model's files were deleted."""

    def kept(self) -> Iterable[str]:
        """Returns the paths of models that clients may not delete."""


class _Pull:
    """One download."""

    def __init__(self) -> None:
        self.listeners = 0
        self.progress: tuple[int, int] | None = None  # bytes on the disk, and bytes of all files
        self.error: ApiError | None = None
        self.task: asyncio.Task[None] | None = None
        self.news = asyncio.Event()

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self.task is not None and self.task.done()


class Pulls:
    def __init__(self, is_allowed: bool, models: DownloadedModels) -> None:
        self._is_allowed = is_allowed
        self._models = models
        self._running: dict[str, _Pull] = {}
        self._is_closed = False

    def require_allowed(self) -> None:
        """Raises ApiError 403."""
        if not self._is_allowed:
            message = (
                "clients may not download or delete models here: the server must be started with --pull allow"
            )
            raise ApiError(403, message, code="pull_off")

    async def pull(self, name: str) -> AsyncGenerator[tuple[int, int], None]:
        """Yields the bytes on the disk and the bytes of all files, whenever they change. Raises ApiError if the
        download fails."""
        pull = self._joined(name)
        pull.listeners += 1
        try:
            told = None
            while True:
                news, ended = pull.news, pull.has_ended
                if pull.progress is not None and pull.progress != told:
                    told = pull.progress
                    yield told
                if ended:
                    break
                await news.wait()
            if pull.error is not None:
                raise pull.error
        finally:
            pull.listeners -= 1
            if not pull.listeners:
                self._drop(name, pull)

    async def delete(self, name: str) -> None:
        """Deletes a downloaded model. Raises ApiError if the model is not on the disk or is being served, or if `name`
        is not a name of the Hub."""
        async with asyncio.timeout(DELETE_S):
            async for said in _said("delete", name, *self._models.kept()):
                _check(said)
                if said.get("path"):
                    self._models.gone(said["path"])

    def close(self) -> None:
        """Ends all downloads. Clients that follow a download get an error."""
        self._is_closed = True
        for name, pull in list(self._running.items()):
            pull.error = _closed()
            self._drop(name, pull)

    def _joined(self, name: str) -> _Pull:
        if self._is_closed:
            raise _closed()
        if name not in self._running:
            if len(self._running) >= MAX_PULLS:
                message = f"{len(self._running)} models are being downloaded already; try again later"
                raise ApiError(503, message, code="overloaded", retry_after=60, refusal=Refusal.QUOTA)
            self._models.require_room(name)
            pull = self._running[name] = _Pull()
            pull.task = asyncio.create_task(self._run(name, pull))
            pull.task.add_done_callback(lambda _: pull.tell())
        return self._running[name]

    def _drop(self, name: str, pull: _Pull) -> None:
        if self._running.get(name) is pull:
            del self._running[name]
        if pull.task is not None:
            pull.task.cancel()

    async def _run(self, name: str, pull: _Pull) -> None:
        try:
            async for said in _said("pull", name):
                _check(said)
                if "total" in said:
                    pull.progress = said["completed"], said["total"]
                    pull.tell()
                elif "done" in said:
                    self._models.come(name, said["path"])
        except ApiError as error:
            pull.error = error


async def _said(*arguments: str) -> AsyncGenerator[dict[str, Any], None]:
    """Runs the download program and yields the JSON objects that it prints. Kills it when the generator is closed.
    Raises ApiError 500 if the program ends without reporting success or an error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", MODULE, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=python_environment() | {LAUNCHER_PID_ENV: str(os.getpid())},
        cwd="/",
    )
    assert process.stdout is not None
    said: dict[str, Any] = {}
    try:
        while line := await process.stdout.readline():
            said = orjson.loads(line)
            yield said
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if "done" not in said and "error" not in said:
        raise ApiError(500, "the download ended by itself; the server's log says why", code="internal_error")


def _check(said: dict[str, Any]) -> None:
    """Raises ApiError if the program reports an error."""
    if "error" in said:
        raise ApiError(_STATUS[said["kind"]], said["error"], code="hub_error")


def _closed() -> ApiError:
    return ApiError(503, _CLOSED, code="shutting_down", refusal=Refusal.SHUTTING_DOWN)

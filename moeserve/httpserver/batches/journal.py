"""Journal: the results of a batch, a line each, appended to a file. It is the file that the client gets in the end.

A line counts once it is synced to the disk. A server that is killed may leave a part of a line behind: it is cut off
when the journal is opened again, and its request is answered again. So each request has exactly one line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import orjson

_PIECE: Final = 1 << 20


class Journal:
    """Written on a thread, all waiting lines at once: on a slow disk a sync takes longer than a short answer."""

    def __init__(self, path: Path) -> None:
        """Opens it where it ends. Raises OSError."""
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._file).st_size
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, line: bytes) -> None:
        """Returns when the line, without its end, is on the disk. Raises OSError, and then has not kept it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((line + b"\n", done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_waiting())
        await asyncio.shield(done)

    async def close(self) -> None:
        """Waits for lines that are being written."""
        if self._writing is not None:
            await self._writing
        os.close(self._file)

    async def _write_waiting(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            error: OSError | None = None
            try:
                await asyncio.to_thread(self._write, b"".join(line for line, _ in waiting))
            except OSError as failed:
                error = failed
            for _, done in waiting:
                if done.done():
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
                    done.exception()  # who waited may have been cancelled
        self._writing = None

    def _write(self, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self.size)  # a full disk has taken a part
            raise
        self.size += len(data)


def recover(path: Path, take: Callable[[dict[str, object]], None]) -> None:
    """Calls `take` with each whole line of a journal that a server before this one wrote, and cuts off the rest. A file
    that does not exist has no lines. Raises OSError."""
    try:
        file = open(path, "r+b")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        good = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                take(orjson.loads(line))
            except orjson.JSONDecodeError:
                break  # blocks that the disk never got, after a power loss
            good += len(line)
        file.truncate(good)
        os.fsync(file.fileno())


def pieces(path: Path) -> Iterator[bytes]:
    """Yields a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece

"""Journal: a file to which the results of a batch are appended, one per line. The client later downloads this file.

A line counts once it is synced to the disk. If a server is killed, the file may end in an incomplete line. Opening the
journal again cuts such a line off, and the line's request is answered again. So each request gets exactly one line.
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
    """A thread writes all waiting lines together, because on a slow disk a sync takes longer than a short answer."""

    def __init__(self, path: Path) -> None:
        """Opens the file for appending. Raises OSError."""
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._file).st_size
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, line: bytes) -> None:
        """Appends a line, given without its line end; returns when it is on the disk. Raises OSError if it could not be
        stored."""
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
                    done.exception()  # marks it as seen: the waiting task may have been cancelled
        self._writing = None

    def _write(self, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self.size)  # a full disk may have stored a part of the lines
            raise
        self.size += len(data)


def recover(path: Path, take: Callable[[dict[str, object]], None]) -> None:
    """Calls `take` with each complete line of a journal that an earlier server wrote, and cuts off an incomplete
    last one. A missing file has no lines. Raises OSError."""
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
                break  # after a power loss, blocks that never reached the disk
            good += len(line)
        file.truncate(good)
        os.fsync(file.fileno())


def pieces(path: Path) -> Iterator[bytes]:
    """Yields a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece

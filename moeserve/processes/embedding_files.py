"""Where the embeddings of requests lie between processes: files of a private folder in the run directory.

    sender      writes a file, and names it in GenerateRequest.spans; removes it when the request has ended
    router      makes a link of its own as the request arrives, and removes it when no plan may name it any more
    worker      reads of the router's link what a step computes, again after a preemption or its own replacement

Each process removes only names that are its own, so no process waits for another to have read: the rows stay until the
last name is gone, and at the latest until the server ends, whose launcher removes the run directory. A name's first
digit says whose it is, so that whoever replaces a killed process finds the names that it left.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Container
from enum import StrEnum
from pathlib import Path

from moeserve.messages.prompt_embeddings import is_handle


class Owner(StrEnum):
    """The first digit of a name."""

    SENDER = "a"  # of the request: httpserver, for which the visual server writes
    ROUTER = "b"


class EmbeddingFiles:
    """Raises OSError where a file is not there or the disk is at fault, ValueError for what is no handle."""

    def __init__(self, folder: Path) -> None:
        """It is made with the first file."""
        self._folder = folder

    def write(self, rows: bytes | memoryview) -> str:
        """The handle of a new file with these bytes."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        handle = Owner.SENDER + secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._folder / handle, flags, 0o600), "wb") as file:
            file.write(rows)
        return handle

    def link(self, handle: str, num_bytes: int) -> str:
        """Another handle of the same rows. Raises ValueError where the file has not `num_bytes`."""
        name = Owner.ROUTER + secrets.token_hex(16)
        os.link(self._path(handle), self._path(name), follow_symlinks=False)
        found = os.lstat(self._path(name))
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            self.remove(name)
            raise ValueError(f"{found.st_size} bytes of embeddings, not {num_bytes}")
        return name

    def read(self, handle: str, rows: memoryview, offset: int, num_bytes: int) -> None:
        """Fills a writable buffer from `offset` on. Raises ValueError where the file has not `num_bytes`."""
        with open(os.open(self._path(handle), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != num_bytes or os.preadv(file.fileno(), [rows], offset) != rows.nbytes:
                raise ValueError(f"{found} bytes of embeddings, not {num_bytes}")

    def remove(self, handle: str) -> None:
        """The rows are gone with their last handle."""
        self._path(handle).unlink(missing_ok=True)

    def remove_left(self, owner: Owner, held: Container[str] = ()) -> None:
        """Removes the owner's names except the held ones: a killed process left them."""
        for path in self._folder.glob(f"{owner}*"):
            if path.name not in held:
                path.unlink(missing_ok=True)

    def _path(self, handle: str) -> Path:
        if not is_handle(handle):
            raise ValueError(f"{handle!r} is no handle of embeddings")
        return self._folder / handle

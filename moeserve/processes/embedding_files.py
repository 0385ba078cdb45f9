"""Stores the embeddings of requests as files in a private folder of the runtime directory, shared by the processes.

sender      writes a file and names it in GenerateRequest.spans; removes it when the request has ended
router      hard-links the file when the request arrives; removes its link when no plan can use it any more
worker      reads the rows that a step needs from the router's link, again after a preemption or a restart of the worker

Each process removes only its own links, so no process waits for another to finish reading. The rows exist until the
last link is removed, at the latest until the launcher removes the runtime directory. The first character of a name
tells its owner, so the successor of a killed process can remove the names that it left.
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
    """The process that owns a name, as the name's first character."""

    SENDER = "a"  # httpserver; the visual server writes on its behalf
    ROUTER = "b"


class EmbeddingFiles:
    """Reads and writes embedding files by handle. Raises OSError for a missing file or a disk error, ValueError for
    a malformed handle."""

    def __init__(self, folder: Path) -> None:
        """folder: created when the first file is written."""
        self._folder = folder

    def write(self, rows: bytes | memoryview) -> str:
        """Writes `rows` to a new file. Returns its handle."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        handle = Owner.SENDER + secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._folder / handle, flags, 0o600), "wb") as file:
            file.write(rows)
        return handle

    def link(self, handle: str, num_bytes: int) -> str:
        """Makes a second link to the rows. Returns the new handle. Raises ValueError if the file's size is not
        `num_bytes`."""
        name = Owner.ROUTER + secrets.token_hex(16)
        os.link(self._path(handle), self._path(name), follow_symlinks=False)
        found = os.lstat(self._path(name))
        if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
            self.remove(name)
            raise ValueError(f"{found.st_size} bytes of embeddings, not {num_bytes}")
        return name

    def size(self, handle: str) -> int:
        """Returns the bytes of a file; 0 if it is gone."""
        try:
            return os.lstat(self._path(handle)).st_size
        except FileNotFoundError:
            return 0

    def read(self, handle: str, rows: memoryview, offset: int, num_bytes: int) -> None:
        """Fills the writable buffer `rows` from byte `offset` on. Raises ValueError if the file's size is not
        `num_bytes`."""
        with open(os.open(self._path(handle), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != num_bytes or os.preadv(file.fileno(), [rows], offset) != rows.nbytes:
                raise ValueError(f"{found} bytes of embeddings, not {num_bytes}")

    def remove(self, handle: str) -> None:
        """Removes a handle. The rows are deleted with their last handle."""
        self._path(handle).unlink(missing_ok=True)

    def remove_left(self, owner: Owner, held: Container[str] = ()) -> None:
        """Removes all names of `owner` except those in `held`: the leftovers of a killed process."""
        for path in self._folder.glob(f"{owner}*"):
            if path.name not in held:
                path.unlink(missing_ok=True)

    def _path(self, handle: str) -> Path:
        if not is_handle(handle):
            raise ValueError(f"{handle!r} is not a handle of embeddings")
        return self._folder / handle

"""BatchFolder: the private folder of files and batches. A write is on the disk when it returns.

File names consist of this server's ids, never of a client's text. One server uses the folder at a time: it holds a
lock, which the kernel releases when the process ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from moeserve.errors import ConfigError
from moeserve.httpserver.batches.records import Batch, StoredFile, is_id

R = TypeVar("R", StoredFile, Batch)

_PARTS: Final = ("files", "batches", "uploads")


class BatchFolder:
    def __init__(self, path: Path) -> None:
        """Creates the folder if necessary. Raises ConfigError."""
        self.path = path
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--batch-dir: {path} is no folder; name an empty one, or a new one")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)  # prompts and answers are private
            for part in _PARTS:
                (path / part).mkdir(mode=0o700, exist_ok=True)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path / "lock", flags, 0o600)
        except OSError as error:
            who = f" (as user {os.geteuid()})" if isinstance(error, PermissionError) else ""
            raise ConfigError(f"--batch-dir: {path} cannot be used: {error}{who}") from error

    def lock(self) -> bool:
        """Takes the lock. Returns False while another server has it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Releases the lock. May be called twice."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def require_regular(self) -> None:
        """Raises ConfigError if an entry with a name of this server's is a folder, link, FIFO or device: its use could
        block, never end, or lead out of the folder."""
        for part in _PARTS:
            with os.scandir(self.path / part) as entries:
                for entry in entries:
                    if is_id(entry.name.partition(".")[0]) and not entry.is_file(follow_symlinks=False):
                        raise ConfigError(f"--batch-dir: {entry.path} is no regular file; move it away")

    def open_upload(self, file_id: str) -> tuple[str, int]:
        """Creates a file for an upload. Returns its name, relative to the folder, and its descriptor."""
        name = f"uploads/{file_id}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        return name, os.open(self.path / name, flags, 0o600)

    def keep_upload(self, name: str, kept: str) -> None:
        """Moves a complete upload, whose bytes are synced already, to its place `kept`."""
        os.rename(self.path / name, self.path / kept)
        self._sync_folder(kept)

    def clear_uploads(self) -> None:
        """Deletes the incomplete uploads of an earlier server."""
        for path in (self.path / "uploads").iterdir():
            if path.is_symlink() or not path.is_dir():
                path.unlink()

    def write(self, part: str, record: StoredFile | Batch) -> None:
        """Writes a record, replacing an older one atomically."""
        final = self.path / part / f"{record.id}.json"
        draft = final.with_suffix(".draft")
        descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(record))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(draft, final)
        self._sync_folder(f"{part}/{final.name}")

    def read(self, part: str, kind: type[R]) -> Iterator[R]:
        """Yields all records in the subfolder `part`. Raises ConfigError for one that cannot be read."""
        for path in sorted((self.path / part).glob("*.json")):
            if not is_id(path.stem):
                continue
            try:
                yield msgspec.json.decode(path.read_bytes(), type=kind)
            except (OSError, msgspec.DecodeError) as error:
                raise ConfigError(f"--batch-dir: {path} cannot be read: {error}; move it away") from error

    def remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()

    def size(self, name: str) -> int:
        """Returns the bytes of a file; 0 if there is none."""
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return 0

    def _sync_folder(self, name: str) -> None:
        descriptor = os.open((self.path / name).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""The folder of the disk tier: private, and locked by one server at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from moeserve.errors import ConfigError

LOCK = "lock"  # its presence also marks the folder as one of --kv-disk
FLAG = "--kv-disk"


class DiskDirectory:
    """A locked folder. The lock ends with this object, or when the process that took it and all its forks have
    ended."""

    def __init__(self, path: Path) -> None:
        """Locks the folder, which is created if missing. Raises ConfigError if it is not writable, holds other
        files, or another server uses it."""
        self.path = path
        try:
            self._lock = _claim(path)
        except OSError as error:
            raise ConfigError(
                f"{FLAG} {path}: the folder cannot be used: {error.strerror or error}; name another"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            os.close(self._lock)


def _claim(path: Path) -> int:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{FLAG} {path}: it is not a folder; name an empty one, or a new one")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (path / LOCK).exists() and any(path.iterdir()):
        raise ConfigError(f"{FLAG} {path}: the folder holds other files; name an empty one, or a new one")
    path.chmod(0o700)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"{FLAG} {path}: another server uses this folder; name another, or stop that server"
        ) from None
    return lock

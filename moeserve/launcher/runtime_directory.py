"""Creates the private directory that holds a server's sockets, and removes directories that killed launchers left.

A launcher keeps a lock on a file in its directory. The kernel releases the lock when the launcher ends in any way,
so a free lock means a dead launcher. A process id would not: it may be reused, or belong to another container.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moeserve.errors import ConfigError
from moeserve.messages.channels import MAX_IPC_PATH_BYTES

PREFIX = "moeserve-"
LOCK = "launcher.lock"

log = logging.getLogger(__name__)


def places() -> list[str]:
    """Returns the parent directories to try, the preferred one first."""
    bases = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
    return [os.path.abspath(base) for base in bases if base]


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """Returns a context with a new directory of mode 0700, which is removed with its contents at the context's end.

    It is created in $XDG_RUNTIME_DIR, which is private and in memory, else in the temporary directory; a parent that
    makes the socket paths too long is skipped. Directories of this user's dead launchers are removed first. Raises
    ConfigError if no parent can be used.
    """
    tried: list[str] = []
    for base in places():
        # mkdtemp adds 8 characters of its own; a process id has at most 7.
        if len(os.fsencode(f"{base}/{PREFIX}xxxxxxxx/control.4194304")) > MAX_IPC_PATH_BYTES:
            tried.append(f"{base} (too long for a socket's path)")
            continue
        remove_stale(Path(base))
        try:
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700
        except OSError as error:
            tried.append(f"{base} ({error.strerror})")
            continue
        try:
            with _lock(directory):
                yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return
    raise ConfigError(
        f"no folder for the server's sockets could be made: {', '.join(tried)}; set TMPDIR to a folder that this user "
        "may write to"
    )


def remove_stale(base: Path) -> None:
    """Removes the directories of this user's dead launchers. A directory that is not certainly one of them stays."""
    for directory in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it vanished, or belongs to someone else
            details = directory.lstat()
            if (
                not stat.S_ISDIR(details.st_mode)
                or stat.S_IMODE(details.st_mode) != 0o700
                or details.st_uid != os.geteuid()
            ):
                continue
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # BlockingIOError: its launcher is alive
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
                log.info("removed %s, which a killed server had left", directory)
            finally:
                os.close(descriptor)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Holds the directory's lock. The file is renamed into place only once locked, so no process finds it unlocked."""
    unnamed = directory / f".{LOCK}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # not inherited by children
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unnamed.rename(directory / LOCK)
        yield
    finally:
        os.close(descriptor)

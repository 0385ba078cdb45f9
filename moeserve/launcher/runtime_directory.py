"""The private directory in which a server's processes meet, and the ones that killed launchers left behind.

A launcher holds a lock on a file in its directory for as long as it lives. The kernel drops it however the launcher
ends, so a lock that can be had means a dead launcher; a process id could belong to another by now, or live in another
container that shares the directory.
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
    """Where such directories may be, the best first."""
    bases = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
    return [os.path.abspath(base) for base in bases if base]


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A new directory that only this user may enter (0700), removed with all in it at the end.

    In $XDG_RUNTIME_DIR, which is private and in memory, else in the temporary directory; a place whose name
    makes the socket paths too long is passed over. What killed launchers of this user have left there goes first.
    Raises ConfigError when there is no place.
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
        f"no place for the sockets' directory: {', '.join(tried)}; set TMPDIR to one that works"
    )


def remove_stale(base: Path) -> None:
    """Removes directories of this user's whose launcher is dead. What is not certainly one stays."""
    for directory in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it vanished, or is none of ours to look into
            details = directory.lstat()
            if (
                not stat.S_ISDIR(details.st_mode)
                or stat.S_IMODE(details.st_mode) != 0o700
                or details.st_uid != os.geteuid()
            ):
                continue
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it lives
                shutil.rmtree(directory)
                log.info("removed %s, which a killed server had left", directory)
            finally:
                os.close(descriptor)


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Holds the directory's lock. The file gets its name when it is locked: no process finds an unlocked one."""
    unnamed = directory / f".{LOCK}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # not inherited by children
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unnamed.rename(directory / LOCK)
        yield
    finally:
        os.close(descriptor)

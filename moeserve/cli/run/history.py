"""The questions of earlier chats, which the up arrow brings back."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

MOST_ENTRIES: Final = 1000
MOST_ENTRY_CHARS: Final = 1 << 16
MOST_BYTES: Final = 8 << 20  # of the file; of a larger one only the end is read
FILE: Final = "chat-history.jsonl"
_OWN: Final = 0o600


def history_path(environment: Mapping[str, str]) -> Path | None:
    """Returns the history's path in the user's state directory; None without a home directory. Source: the XDG base
    directory specification, which says to ignore relative paths."""
    state = environment.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return folder / "moeserve" / FILE


class History:
    """Earlier entries, in a file that only its owner can read.

    Each line is one entry as a JSON string, so that an entry of several lines is restored whole. Chats that run at the
    same time share the file. If the file cannot be used, `problem` says so once, and the chat continues without it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.problem = ""

    def entries(self) -> list[str]:
        """Returns the entries, oldest first. Shortens the file to MOST_ENTRIES if it has twice as many."""
        found: list[str] = []
        with self._open() as file:
            if file is not None:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MOST_BYTES))
                found = list(_entries(file))
                if len(found) > 2 * MOST_ENTRIES or size > MOST_BYTES:
                    file.seek(0)
                    file.truncate()
                    file.writelines(map(_line, found[-MOST_ENTRIES:]))
        return found[-MOST_ENTRIES:]

    def add(self, entry: str) -> None:
        if len(entry) <= MOST_ENTRY_CHARS:
            with self._open() as file:
                if file is not None:
                    file.seek(0, os.SEEK_END)
                    file.write(_line(entry))

    @contextmanager
    def _open(self) -> Iterator[IO[bytes] | None]:
        """Opens and locks the file; None if there is none. Ignores OSError, also within the `with` block."""
        file = None if self._path is None else self._opened(self._path)
        if file is None:
            yield None
            return
        try:
            with file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
        except OSError as error:
            self._give_up(error)

    def _opened(self, path: Path) -> IO[bytes] | None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            file = open(os.open(path, flags, _OWN), "r+b")  # noqa: SIM115  # the caller closes it
            os.fchmod(file.fileno(), _OWN)
        except OSError as error:
            self._give_up(error)
            return None
        return file

    def _give_up(self, error: OSError) -> None:
        self.problem = f"no history is kept: {self._path}: {error.strerror}"
        self._path = None


def _line(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _entries(file: IO[bytes]) -> Iterator[str]:
    for line in file:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # an incomplete line, for example after a full disk
        if isinstance(entry, str):
            yield entry

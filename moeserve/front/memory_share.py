"""The memory, shared by models, that earlier fronts of the same server still hold.

In an upgrade the next front takes the new requests while the earlier front still finishes its answers. Each front has a
file in the shared folder. When a front leaves, it publishes in its file the memory that its models hold, until they
hold none; the next front loads its models in the rest. A front is locked out while an earlier one has published
nothing, because that one may still load models. The lock on a file ends with its front, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from moeserve.front.memory import Held, Memory

SUFFIX: Final = ".held"
MAX_BYTES: Final = 1 << 20


NOTHING: Final = Held(Memory(0))


class MemoryShare:
    """The view of one front. Its file stays locked until the process ends, or until `close`."""

    def __init__(self, folder: Path) -> None:
        """Joins the fronts that share `folder`, as the last of them. Raises OSError."""
        self._folder = folder
        self._path = folder / f"{time.monotonic_ns():020d}-{os.getpid()}{SUFFIX}"
        draft = self._path.with_suffix(".new")
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        draft.rename(self._path)  # now others see it, locked
        self._published: Held | None = None
        self._last: dict[Path, Held] = {}  # as last read

    def publish(self, held: Held) -> None:
        """Tells later fronts the memory that this one still holds. It must load nothing more than that."""
        if held != self._published:
            line = msgspec.json.encode(held) + b"\n"
            os.pwrite(self._file, line, 0)
            os.ftruncate(self._file, len(line))
            self._published = held

    def held_by_earlier(self) -> Held | None:
        """Returns the memory that all earlier fronts hold together; None while one of them may still load models."""
        found: list[Held] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path >= self._path:
                break
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    held = self._read(path, file.read(MAX_BYTES))
                    if held is None:
                        return None
                    found.append(held)
                else:  # its front has ended
                    path.unlink()
        return _together(found)

    def close(self) -> None:
        os.close(self._file)

    def _read(self, path: Path, line: bytes) -> Held | None:
        # While the file is being written, the last read value counts.
        with contextlib.suppress(msgspec.MsgspecError):
            self._last[path] = msgspec.json.decode(line, type=Held)
        return self._last.get(path)


def _together(found: list[Held]) -> Held:
    total = NOTHING
    for held in found:
        total = Held(
            total.memory.plus(held.memory),
            total.folders | held.folders,
            held.ram_budget if total.ram_budget is None else total.ram_budget,
            held.gpus if total.gpus is None else total.gpus,
        )
    return total

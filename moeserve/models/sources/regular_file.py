"""Maps files, as untrusted input, and tells their versions apart."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import NamedTuple


class FileVersion(NamedTuple):
    """Distinguishes a file from a later file of the same path."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileVersion:
        """Returns the version of the file at a path, or of an open file's number. Raises OSError."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def map_file(path: Path) -> mmap.mmap:
    """Returns the memory of a whole file, mapped read-only and shared. Raises OSError, with the reason in `strerror` or
    its text, for a file that cannot be opened, is empty, or is no regular file."""
    return map_version(path)[0]


def map_version(path: Path) -> tuple[mmap.mmap, FileVersion]:
    """Maps a file as `map_file` does; also returns the version of the file that is mapped."""
    with open(path, "rb", opener=_open_regular) as file:
        version = FileVersion.of(file.fileno())
        if version.num_bytes == 0:
            raise OSError("the file is empty; download it again")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), version


def drop_cached(path: Path, version: FileVersion, start: int, end: int) -> None:
    """Removes bytes start .. end of a file from the system's page cache, except pages that a process has mapped. Does
    nothing if the path now has another file than `version`, or on systems without this call."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            if FileVersion.of(file.fileno()) == version:
                os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
    except OSError:
        return


def _open_regular(path: str, flags: int) -> int:
    """Opens the file without blocking, because a FIFO in the model's place would hang the start."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is not a regular file")
    return fd

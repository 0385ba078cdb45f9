"""Maps files, as untrusted input."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path


def map_file(path: Path) -> mmap.mmap:
    """Maps a whole file, read-only and shared. Raises OSError, with the reason in `strerror` or its text, for a file
    that cannot be opened, is empty, or is no regular file."""
    with open(path, "rb", opener=_open_regular) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise OSError("the file is empty; download it again")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _open_regular(path: str, flags: int) -> int:
    """Opens the file without blocking, because a FIFO in the model's place would hang the start."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is not a regular file")
    return fd

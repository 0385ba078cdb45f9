"""Maps files that are untrusted input."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only and shared. OSError, with a reason in `strerror` or as its text, for what cannot be
    opened, is empty, or is no regular file."""
    with open(path, "rb", opener=_open_regular) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise OSError("the file is empty; download it again")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _open_regular(path: str, flags: int) -> int:
    """Opens without waiting: a FIFO in the model's place would otherwise hang the start."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is not a regular file")
    return fd

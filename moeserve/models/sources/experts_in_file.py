"""Where a file has the rows of an expert tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileVersion(NamedTuple):
    """Tells a file from another one in its place."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileVersion:
        """Returns the version of the file at `path`. Raises OSError."""
        found = os.stat(path)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class ExpertsInFile(NamedTuple):
    """An expert tensor [E, out, in], expert by expert."""

    path: Path
    version: FileVersion
    offset: int  # bytes from the start of the file to the first expert
    stride: int  # bytes from one expert to the next

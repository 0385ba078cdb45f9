"""The place of an expert tensor's rows in a file."""

from __future__ import annotations

import os
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


class ExpertsInFile(NamedTuple):
    """An expert tensor [E, out, in], expert by expert."""

    path: Path
    version: FileVersion
    offset: int  # bytes from the start of the file to the first expert
    stride: int  # bytes from one expert to the next

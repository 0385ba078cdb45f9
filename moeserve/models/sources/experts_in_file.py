"""The place of an expert tensor's rows in a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moeserve.models.sources.regular_file import FileVersion


class ExpertsInFile(NamedTuple):
    """An expert tensor [E, out, in], expert by expert."""

    path: Path
    version: FileVersion
    offset: int  # bytes from the start of the file to the first expert
    stride: int  # bytes from one expert to the next

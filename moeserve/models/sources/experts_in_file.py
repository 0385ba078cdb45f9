"""Where a file has the rows of an expert tensor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class ExpertsInFile(NamedTuple):
    """An expert tensor [E, out, in], expert by expert."""

    path: Path
    offset: int  # bytes from the start of the file to the first expert
    stride: int  # bytes from one expert to the next

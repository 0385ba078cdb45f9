"""Measures the rate at which experts can be read from a model's disk."""

from __future__ import annotations

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeserve.placement.expert_ram import PIECE_BYTES, READERS

SECONDS: Final = 0.5
LEAST_PIECES: Final = (
    64  # size of a file: in a smaller one pieces would repeat and come from the device's cache
)


@dataclass(frozen=True, slots=True)
class DiskRate:
    bytes_per_s: float
    origin: str  # where the rate comes from, as text


def measure_disk(path: Path) -> DiskRate | None:
    """Reads pieces of the file at random places for half a second, as the engine reads experts. Returns None if the
    result would mean nothing: for a small file, or one that cannot be read past the page cache."""
    pieces = path.stat().st_size // PIECE_BYTES
    if pieces < LEAST_PIECES:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(READERS) as readers:
            seeds = range(READERS)
            read = sum(readers.map(lambda seed: _read(descriptor, pieces, seed, began + SECONDS), seeds))
        seconds = time.perf_counter() - began
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return DiskRate(read / seconds, "measured")


def _read(descriptor: int, pieces: int, seed: int, until: float) -> int:
    """Returns the bytes read: at least one piece."""
    places, count = random.Random(seed), 0
    with mmap.mmap(-1, PIECE_BYTES) as buffer:  # aligned to pages, as O_DIRECT demands
        while True:
            count += os.preadv(descriptor, [buffer], places.randrange(pieces) * PIECE_BYTES)
            if time.perf_counter() > until:
                return count

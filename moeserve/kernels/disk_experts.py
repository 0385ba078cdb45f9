"""Experts on disk: opens the C++ reader that brings them into RAM slots (csrc/expert_disk)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream, Matrix


class Reading(NamedTuple):
    """Settings of reading experts from disk, and of choosing the expert that a new one replaces."""

    readers: int  # threads, each with one read in progress
    piece_bytes: int  # approximate bytes per read
    decay: float  # factor of an expert's score per step, as in the expert cache's policy
    patience_s: float = 30.0  # if no read ends for this long, a step stops waiting for its experts


class DiskPart(NamedTuple):
    """The position in a file of one of the three matrices (gate, up, down) of a layer's experts."""

    slots: Matrix
    path: Path
    offset: int  # the first expert's position in the file, in bytes
    stride: int  # bytes from one expert to the next


class DiskExpertLayer(NamedTuple):
    num_experts: int
    parts: tuple[DiskPart, DiskPart, DiskPart]  # gate, up, down
    pinned: Sequence[int] = ()  # ascending; experts that are read at the start and keep their slots
    numbers: Sequence[int] = ()  # each expert's number in the file; empty: the same number


def open_disk_experts(
    stream: CpuStream,
    layers: Sequence[DiskExpertLayer | None],
    reading: Reading,
) -> _C.DiskExperts:
    """Starts the reading threads, writes zeros to all slots, so that their memory is allocated now, reads the pinned
    experts, and returns the reader of missing experts. layers: None for a layer without experts on disk.

    Raises OSError if a file cannot be opened, or a pinned expert cannot be read.
    """
    paths = sorted({part.path for layer in layers if layer is not None for part in layer.parts})
    number = {path: index for index, path in enumerate(paths)}

    def native(
        layer: DiskExpertLayer,
    ) -> tuple[int, list[tuple[Matrix, int, int, int]], list[int], list[int]]:
        parts = [(p.slots, number[p.path], p.offset, p.stride) for p in layer.parts]
        return layer.num_experts, parts, list(layer.pinned), list(layer.numbers)

    of_layers = [None if layer is None else native(layer) for layer in layers]
    r = reading
    return _C.DiskExperts(
        stream.native,
        [str(path) for path in paths],
        of_layers,
        r.readers,
        r.piece_bytes,
        r.decay,
        r.patience_s,
    )

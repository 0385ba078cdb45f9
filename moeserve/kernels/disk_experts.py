"""Experts on disk: opens the C++ reader that brings them into RAM slots (csrc/expert_disk)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream, Matrix

# Pieces of a megabyte that are read at once, each by a thread: as many keep an NVMe drive busy.
READERS: Final = 8
PIECE_BYTES: Final = 1 << 20  # of each reader's buffer, about
# Seconds without the end of any read, after which a step gives up on what it waits for.
PATIENCE_S: Final = 30.0


class DiskPart(NamedTuple):
    """One of a layer's three matrices of experts."""

    slots: Matrix
    path: Path
    offset: int  # of the first expert in the file
    stride: int  # bytes from one expert to the next


class DiskExpertLayer(NamedTuple):
    num_experts: int
    parts: tuple[DiskPart, DiskPart, DiskPart]  # gate, up, down


def open_disk_experts(
    stream: CpuStream,
    layers: Sequence[DiskExpertLayer | None],
    decay: float,
    *,
    readers: int = READERS,
    patience_s: float = PATIENCE_S,
) -> _C.DiskExperts:
    """Starts the reading threads, and writes zeros to all slots, so that their memory is taken now. layers: None for a
    layer without experts on disk. decay: of an expert's score with each step, as in the expert cache's policy.

    Raises OSError for a file that cannot be opened.
    """
    paths = sorted({part.path for layer in layers if layer is not None for part in layer.parts})
    number = {path: index for index, path in enumerate(paths)}

    def native(layer: DiskExpertLayer) -> tuple[int, list[tuple[Matrix, int, int, int]]]:
        return layer.num_experts, [(p.slots, number[p.path], p.offset, p.stride) for p in layer.parts]

    of_layers = [None if layer is None else native(layer) for layer in layers]
    return _C.DiskExperts(stream.native, [str(path) for path in paths], of_layers, readers, decay, patience_s)

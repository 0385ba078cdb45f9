"""Uploads a file's bytes to a GPU as planes, through two pinned buffers: while one piece is copied and repacked on
the GPU, the next is read from the file. Nothing is kept in RAM.

A single thread reads a mapped file more slowly than the GPU accepts it, so several threads read a piece, a part
each.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.planes import Planes, repack_into

PIECE_BYTES = 32 << 20
MOST_READERS: Final = 8
LEAST_PART: Final = 1 << 20  # smallest part for which a thread is woken, in bytes


class Upload:
    """Uploads in pieces through two alternating buffers. Close it at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._staging = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in "ab"]
        self._copied = [torch.cuda.Event() for _ in "ab"] if self._is_gpu else []
        self._turn = 0
        self._num_readers = min(MOST_READERS, len(os.sched_getaffinity(0)))
        self._readers = ThreadPoolExecutor(self._num_readers, "upload")

    def close(self) -> None:
        """Ends its threads."""
        self._readers.shutdown()

    def rows(self, planes: Planes, data: npt.NDArray[np.uint8], row: int) -> None:
        """Uploads GGUF rows (data: flat uint8, contiguous) to the planes' rows from `row` on, repacked on the GPU, at
        most PIECE_BYTES at a time. A row has at most PIECE_BYTES."""
        row_bytes = bytes_of_row(planes)
        step = max(1, PIECE_BYTES // row_bytes) * row_bytes
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            repack_into(planes, self._to_device(piece), row + start // row_bytes)

    def _to_device(self, piece: npt.NDArray[np.uint8]) -> Tensor:
        self._turn ^= 1
        staging = self._staging[self._turn][: len(piece)]
        if not self._is_gpu:
            self._read(staging.numpy(), piece)
            return staging
        self._copied[self._turn].synchronize()
        self._read(staging.numpy(), piece)
        there = staging.to(self._device, non_blocking=True)
        self._copied[self._turn].record()
        return there

    def _read(self, into: npt.NDArray[np.uint8], piece: npt.NDArray[np.uint8]) -> None:
        part = max(LEAST_PART, -(-len(piece) // self._num_readers))
        parts = [slice(start, start + part) for start in range(0, len(piece), part)]
        if len(parts) == 1:
            into[:] = piece
            return

        def copy(part: slice) -> None:
            into[part] = piece[part]  # numpy releases the GIL

        for _ in self._readers.map(copy, parts):
            pass


def bytes_of_row(planes: Planes) -> int:
    """Returns the bytes of a GGUF row."""
    return planes.type.row_bytes(planes.cols)

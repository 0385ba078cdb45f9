"""Bytes of a file to planes on a GPU, through two buffers of pinned memory: while one piece is copied to the GPU and
taken apart there, the next is read from the file. Nothing is held in RAM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.planes import Planes, repack_into

PIECE_BYTES = 32 << 20


class Upload:
    """Bytes of the file to planes, in pieces, through two buffers in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._staging = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in "ab"]
        self._copied = [torch.cuda.Event() for _ in "ab"] if self._is_gpu else []
        self._turn = 0

    def rows(self, planes: Planes, data: npt.NDArray[np.uint8], row: int) -> None:
        """GGUF rows to rows `row` on of the planes. A row is at most PIECE_BYTES."""
        row_bytes = bytes_of_row(planes)
        step = max(1, PIECE_BYTES // row_bytes) * row_bytes
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            repack_into(planes, self._to_device(piece), row + start // row_bytes)

    def _to_device(self, piece: npt.NDArray[np.uint8]) -> Tensor:
        self._turn ^= 1
        staging = self._staging[self._turn][: len(piece)]
        if not self._is_gpu:
            staging.numpy()[:] = piece
            return staging
        self._copied[self._turn].synchronize()
        staging.numpy()[:] = piece
        there = staging.to(self._device, non_blocking=True)
        self._copied[self._turn].record()
        return there


def bytes_of_row(planes: Planes) -> int:
    """Of the GGUF's row."""
    return planes.type.row_bytes(planes.cols)

"""Where an expert's panels lie: each NUMA node owns a contiguous range of the panels of all experts.

    memory of a matrix on two nodes    | expert 0, first half | expert 1, first half | .. | expert 0, second half | ..
    on the GPU                         | expert 0 | expert 1 | ..

So a copy of an expert to the GPU has one piece for each node.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.cpu_stream import Matrix
from moeserve.kernels.planes import Planes
from moeserve.kernels.planes.panels_triton import unpack_scattered


class NodePiece(NamedTuple):
    """One node's part of a matrix."""

    start: int  # its first byte within the matrix
    each: int  # bytes of an expert in it, 0 if the matrix has fewer panels than nodes
    offset: int  # of these bytes within the expert
    first_row: int
    rows: int  # of an expert


def pieces_of(matrix: Matrix) -> list[NodePiece]:
    """Returns the parts of a packed matrix, one for each NUMA node (see `first_panel` in csrc/pool/placement.h)."""
    panels = -(-matrix.rows // PANEL_ROWS)
    panel_bytes = matrix.bytes // (matrix.experts * panels)
    ends = [panels * node // matrix.nodes for node in range(matrix.nodes + 1)]
    return [
        NodePiece(
            matrix.experts * first * panel_bytes,
            (last - first) * panel_bytes,
            first * panel_bytes,
            first * PANEL_ROWS,
            (last - first) * PANEL_ROWS,
        )
        for first, last in pairwise(ends)
    ]


class PieceUnpacker:
    """Converts one node's piece of a matrix from panels to planes: rows `first_row` on of each expert."""

    def __init__(self, panels: Tensor, planes: Planes, piece: NodePiece) -> None:
        """panels: flat uint8 on the planes' device, the piece of all their experts."""
        self._panels, self._planes, self._piece = panels, planes, piece
        experts = torch.arange(planes.experts)
        columns = [panels.data_ptr() + experts * piece.each]
        for tensor in (planes.codes, planes.scales, planes.supers):
            of_row = tensor.nbytes // (planes.experts * planes.rows)
            at = tensor.data_ptr() + (experts * planes.rows + piece.first_row) * of_row
            columns.append(at if tensor.numel() else torch.zeros_like(experts))
        self._addresses = torch.stack(columns, dim=1).to(panels.device)  # see `unpack_scattered`

    def launch(self, experts: int) -> None:
        """Launches the conversion of the first `experts` experts."""
        planes, piece = self._planes, self._piece
        if not piece.rows:
            return
        if planes.type.planes_form is not None:
            unpack_scattered(self._addresses[:experts], planes.type, piece.rows, planes.cols)
            return
        own = self._panels[: experts * piece.each].view(planes.codes.dtype)
        rows = planes.codes[:experts].view(experts, planes.rows, planes.cols)[:, piece.first_row :]
        panels = rows[:, : piece.rows].unflatten(1, (-1, PANEL_ROWS))
        panels.copy_(own.view(experts, -1, planes.cols, PANEL_ROWS).transpose(2, 3))

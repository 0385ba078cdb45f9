"""Tables of addresses for the kernels that fill slots; one copy updates all of them.

A batch is divided into groups, launched one after another, so that a group's experts can be used before the next
group's have arrived. All groups have room for the same number of experts, so that their launches never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import Matrix
from moeserve.kernels.handoff import CpuExperts
from moeserve.models.loading.gpu_weights import GpuExperts
from moeserve.models.loading.node_pieces import pieces_of
from moeserve.models.loading.pinned_panels import PinnedPanels
from moeserve.quantization import QUANT_TYPES

ALIGNMENT = 256
MATRICES = 3  # per expert
PLANES = 3  # per matrix: codes, scales, supers

Kind = tuple[int, int, int]  # a matrix's type, rows and columns


Batch = npt.NDArray[np.int64]  # [fillings, 4]: layer, expert, its place in RAM, its slot


class SlotLayer:
    """A layer's slots, and the source of its experts."""

    def __init__(self, slots: GpuExperts, experts: CpuExperts, device: torch.device) -> None:
        self.planes = (slots.gate, slots.up, slots.down)
        self.kinds = [_kind_of(matrix) for matrix in experts.matrices]
        self.each = [matrix.bytes // matrix.experts for matrix in experts.matrices]
        self.pieces = [pieces_of(matrix) for matrix in experts.matrices]
        aligned = [-(-each // ALIGNMENT) * ALIGNMENT for each in self.each]
        # offsets of the matrices in the staging buffer
        self.offsets = [0, aligned[0], aligned[0] + aligned[1]]
        self.bytes = sum(aligned)
        # All experts' biases on the device, float32 [experts, width] by expert, and the slots' [slots, width].
        self.biases: list[tuple[Tensor, Tensor]] = []
        if experts.biases is not None:
            assert slots.biases is not None
            places = experts.expert_map.long().clamp(min=0)
            self.biases = [
                (bias.to(device)[places], of_slots)
                for bias, of_slots in zip(experts.biases, slots.biases, strict=True)
            ]

    @property
    def is_quantised(self) -> bool:
        """True if the expert has no float matrices, which are copied one by one."""
        return all(QUANT_TYPES[kind[0]].planes_form is not None for kind in self.kinds)

    @property
    def bias_copies(self) -> list[tuple[int, int, int]]:
        """For each bias: address of expert 0's, address of slot 0's, bytes of one."""
        return [(own.data_ptr(), slots.data_ptr(), 4 * own.shape[1]) for own, slots in self.biases]


class Group(NamedTuple):
    """The part of the tables that belongs to one group of a batch, as int64 views."""

    copies: Tensor  # [1 + fillings * (3 * NUMA nodes + biases), 3]: see copy_scattered
    addresses: list[Tensor]  # for each kind, [its matrices, 4]: see unpack_scattered
    entries: Tensor  # [1 + fillings, 2]: see store_scattered


class PromotionTables:
    """The tables on the host, written by `write`, and on the device, where kernels read them."""

    def __init__(
        self,
        layers: Sequence[SlotLayer | None],
        panels: PinnedPanels,
        staging: Tensor,
        most: int,
        groups: int,
        num_experts: int,
    ) -> None:
        """staging: uint8 [most, bytes per expert]. most: experts per batch. num_experts: experts per layer of the
        map."""
        device = staging.device
        some = [layer for layer in layers if layer is not None]
        self.kinds = sorted({kind for layer in some for kind in layer.kinds})
        of_group = -(-most // groups)
        # For each group: room per kind. The kinds' matrices follow one another.
        self._rows = [max(layer.kinds.count(kind) for layer in some) * of_group for kind in self.kinds]
        pieces = MATRICES * len(some[0].pieces[0])  # of an expert
        biases = max(len(layer.biases) for layer in some)
        copies = 3 * (1 + (pieces + biases) * of_group)
        self._addresses = copies + copies % 2  # all parts are padded to multiples of 16 bytes
        self._kind_starts = self._addresses + 4 * np.cumsum([0, *self._rows])
        self._entries = int(self._kind_starts[-1])
        size = self._entries + 2 * (1 + of_group)
        self._on_host = torch.zeros(groups, size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(groups, size, dtype=torch.int64, device=device)
        self.groups = [self._views(row, copies) for row in self._on_device]
        # By matrix and NUMA node.
        self._source, self._each, self._offset = (np.zeros((len(layers), pieces), np.int64) for _ in range(3))
        self._kind = np.zeros((len(layers), MATRICES), np.int64)
        # For codes, scales and supers: address, and bytes per expert.
        self._target, self._target_each = (
            np.zeros((len(layers), MATRICES * PLANES), np.int64) for _ in range(2)
        )
        self._bias_copies = np.zeros((3, len(layers), biases), np.int64)
        for index, layer in enumerate(layers):
            if layer is not None:
                self._add(index, layer, panels)
        self._native = _C.PromotionTables(
            self._on_host.numpy(),
            self._kind_starts.tolist(),
            source=self._source,
            each=self._each,
            offset=self._offset,
            kind=self._kind,
            target=self._target,
            target_each=self._target_each,
            bias_source=self._bias_copies[0],
            bias_target=self._bias_copies[1],
            bias_each=self._bias_copies[2],
            staging=staging.data_ptr(),
            staging_bytes=staging.shape[1],
            most=most,
            experts=num_experts,
        )

    def write(self, batch: Batch) -> None:
        """Writes a batch to the host's tables, divided among the groups in order. Raises ValueError for a batch that
        is too large or has numbers out of range."""
        self._native.write(batch)

    def matrices(self, batch: Batch) -> list[int]:
        """Returns how many matrices of each kind the batch has."""
        counts: list[int] = np.bincount(self._kind[batch[:, 0]].ravel(), minlength=len(self.kinds)).tolist()
        return counts

    def copy(self) -> None:
        """Launches the copy to the device."""
        self._on_device.copy_(self._on_host, non_blocking=True)

    def _views(self, row: Tensor, copies: int) -> Group:
        addresses = [
            row[start : start + 4 * rows].view(-1, 4)
            for start, rows in zip(self._kind_starts.tolist(), self._rows, strict=False)
        ]
        return Group(row[:copies].view(-1, 3), addresses, row[self._entries :].view(-1, 2))

    def _add(self, index: int, layer: SlotLayer, panels: PinnedPanels) -> None:
        pieces = [
            (matrix.data_ptr() + piece.start, piece.each, offset + piece.offset)
            for matrix, offset, of in zip(panels_of(panels, index), layer.offsets, layer.pieces, strict=True)
            for piece in of
        ]
        self._source[index], self._each[index], self._offset[index] = zip(*pieces, strict=True)
        self._kind[index] = [self.kinds.index(kind) for kind in layer.kinds]
        for i, planes in enumerate(layer.planes):
            tensors = (planes.codes, planes.scales, planes.supers)
            at = slice(PLANES * i, PLANES * (i + 1))
            self._target[index, at] = [t.data_ptr() if t.numel() else 0 for t in tensors]
            self._target_each[index, at] = [t.nbytes // planes.experts for t in tensors]
        if layer.biases:
            self._bias_copies[:, index] = np.array(layer.bias_copies, np.int64).T


def panels_of(panels: PinnedPanels, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a layer's panels of gate, up and down. Without gates both inputs are `up`, written twice."""
    *inputs, down = panels.of(layer)
    return inputs[0], inputs[-1], down


def _kind_of(matrix: Matrix) -> Kind:
    return matrix.type, matrix.rows, matrix.cols

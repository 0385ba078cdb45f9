"""Slots in GPU memory whose experts change while steps run.

    between two steps    the old expert's slot leaves the maps                      `free`
    during the next      panels are copied and unpacked into the slot, beside the step      `fill`
    between two steps    if that is done, the new expert's slot enters the maps     `filled`, then ExpertMaps.put

No step reads a slot that is being written: it left the maps before the step was launched, and the copies wait for what
was launched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import Matrix
from moeserve.kernels.handoff import CpuExperts
from moeserve.kernels.launch import is_compiling_ahead
from moeserve.kernels.planes import Planes
from moeserve.kernels.planes.copies import copy_scattered
from moeserve.kernels.planes.from_panels import panels_to_planes
from moeserve.kernels.planes.panels_triton import unpack_scattered
from moeserve.models.loading.gpu_weights import GpuExperts
from moeserve.models.loading.pinned_panels import PinnedPanels
from moeserve.quantization import QUANT_TYPES

ALIGNMENT = 256


class Filling(NamedTuple):
    """An expert on its way into a slot of its layer."""

    layer: int
    place: int  # of the expert in RAM
    slot: int


class ExpertSlots:
    """One batch of fillings at a time. Calls come from the thread that launches the steps."""

    def __init__(
        self,
        gpu: Sequence[GpuExperts | None],
        ram: Sequence[CpuExperts | None],
        panels: PinnedPanels,
        staging: Tensor,
    ) -> None:
        """gpu, ram: of each layer the slots, and the experts in RAM; None: there are none. staging: uint8 on the
        device, aligned, which the panels of a batch pass through: it is free whenever `fill` is called."""
        device = staging.device
        self._is_gpu = device.type == "cuda"
        self._panels = panels  # which stay pinned as long as this object is
        self._layers = [
            _Layer(slots, experts, device) if slots is not None and experts is not None else None
            for slots, experts in zip(gpu, ram, strict=True)
        ]
        expert = max(layer.bytes for layer in self._layers if layer is not None)
        self.most = most = len(staging) // expert  # fillings of a batch
        self._staging = staging[: most * expert].view(most, expert)
        # int64 [fillings * 3, 4]: see unpack_scattered.
        self._addresses_on_host = torch.zeros(3 * most, 4, dtype=torch.int64, pin_memory=self._is_gpu)
        self._addresses = torch.zeros(3 * most, 4, dtype=torch.int64, device=device)
        # int64 [1 + fillings * 3, 3]: see copy_scattered.
        self._copies_on_host = torch.zeros(1 + 3 * most, 3, dtype=torch.int64, pin_memory=self._is_gpu)
        self._copies = torch.zeros(1 + 3 * most, 3, dtype=torch.int64, device=device)
        self._kinds = sorted({kind for layer in self._layers if layer is not None for kind in layer.kinds})
        self._table = _Table(self._layers, panels, self._kinds)
        self._is_filling = False
        if self._is_gpu:
            self._copier = torch.cuda.Stream()
            self._freed, self._done = torch.cuda.Event(), torch.cuda.Event()

    @property
    def is_filling(self) -> bool:
        """A batch is under way."""
        return self._is_filling

    def bytes_of(self, layer: int) -> int:
        """Of one expert, as it is copied."""
        of = self._layers[layer]
        return 0 if of is None else of.bytes

    def free(self) -> None:
        """What was launched so far may read the slots to be filled; what follows does not."""
        if self._is_gpu:
            self._freed.record()

    def fill(self, batch: Sequence[Filling]) -> None:
        """Launches the copies beside the step under way, behind what `free` has marked."""
        self._is_filling = True
        if not self._is_gpu:
            self._launch(batch)
            return
        with torch.cuda.stream(self._copier):
            self._copier.wait_event(self._freed)
            self._launch(batch)
            self._done.record()

    def filled(self, *, wait: bool = False) -> bool:
        """Whether the batch is there: then what is launched from here on may read it. wait: until it is."""
        if self._is_gpu:
            if wait:
                self._done.synchronize()
            elif not self._done.query():
                return False
            torch.cuda.current_stream().wait_event(self._done)
        self._is_filling = False
        return True

    def compile(self) -> None:
        """Within `compile_ahead`: every kernel that `fill` can launch."""
        assert is_compiling_ahead()
        copy_scattered(self._copies)
        for kind in self._kinds:
            self._unpack(kind, slice(0, 1))

    def _launch(self, batch: Sequence[Filling]) -> None:
        layer, place, slot = np.array(batch, np.int64).T
        staging = self._staging.data_ptr() + np.arange(len(batch)) * self._staging.shape[1]
        t = self._table
        pieces = staging[:, None] + t.offset[layer]
        sources = t.source[layer] + place[:, None] * t.each[layer]
        targets = t.target[layer] + slot[:, None, None] * t.target_each[layer]
        rows = np.concatenate([pieces[..., None], targets], axis=2)  # [fillings, matrices, 4]
        kinds = t.kind[layer]
        self._copy(np.stack([sources, pieces, t.each[layer]], axis=2).reshape(-1, 3))
        by_kind = [rows[kinds == number] for number in range(len(self._kinds))]
        self._unpack_all(by_kind)
        for i, filling in enumerate(batch):
            self._finish(filling, self._staging[i])

    def _copy(self, copies: npt.NDArray[np.int64]) -> None:
        """By a kernel: a call of the copying engine takes the host as long as a small piece takes PCIe."""
        table = self._copies_on_host.numpy()
        table[0, 0] = len(copies)
        table[1 : 1 + len(copies)] = copies
        self._copies.copy_(self._copies_on_host, non_blocking=True)
        copy_scattered(self._copies)

    def _finish(self, filling: Filling, staging: Tensor) -> None:
        """What has no blocks to unpack: matrices of floats, and biases."""
        of = self._layers[filling.layer]
        assert of is not None
        for kind, planes, offset, each in zip(of.kinds, of.planes, of.offsets, of.each, strict=True):
            if QUANT_TYPES[kind[0]].layout is None:
                panels_to_planes(staging[offset : offset + each], _expert_of(planes, filling.slot))
        of.copy_biases(filling.place, filling.slot)

    def _unpack_all(self, by_kind: list[npt.NDArray[np.int64]]) -> None:
        rows = np.concatenate(by_kind)
        self._addresses_on_host[: len(rows)] = torch.from_numpy(rows)
        self._addresses[: len(rows)].copy_(self._addresses_on_host[: len(rows)], non_blocking=True)
        at = 0
        for kind, of_kind in zip(self._kinds, by_kind, strict=True):
            if len(of_kind):
                self._unpack(kind, slice(at, at + len(of_kind)))
            at += len(of_kind)

    def _unpack(self, kind: tuple[int, int, int], rows: slice) -> None:
        quant_type = QUANT_TYPES[kind[0]]
        if quant_type.layout is not None:
            unpack_scattered(self._addresses[rows], quant_type, *kind[1:])


class _Table:
    """By layer and matrix (gate, up, down): where bytes come from and go to. int64; zeros for layers without slots."""

    def __init__(
        self,
        layers: Sequence[_Layer | None],
        panels: PinnedPanels,
        kinds: Sequence[tuple[int, int, int]],
    ) -> None:
        shape = (len(layers), 3)
        self.source, self.each, self.offset, self.kind = (np.zeros(shape, np.int64) for _ in range(4))
        # Of codes, scales and supers: the address, and the bytes of an expert.
        self.target, self.target_each = (np.zeros((*shape, 3), np.int64) for _ in range(2))
        for index, layer in enumerate(layers):
            if layer is None:
                continue
            self.source[index] = [panel.data_ptr() for panel in panels.of(index)]
            self.each[index], self.offset[index] = layer.each, layer.offsets
            self.kind[index] = [kinds.index(kind) for kind in layer.kinds]
            for i, planes in enumerate(layer.planes):
                tensors = (planes.codes, planes.scales, planes.supers)
                self.target[index, i] = [t.data_ptr() if t.numel() else 0 for t in tensors]
                self.target_each[index, i] = [t.nbytes // planes.experts for t in tensors]


class _Layer:
    """A layer's slots, and where its experts come from."""

    def __init__(self, slots: GpuExperts, experts: CpuExperts, device: torch.device) -> None:
        self.planes = (slots.gate, slots.up, slots.down)
        self.kinds = [_kind_of(matrix) for matrix in experts.matrices]
        self.each = [matrix.bytes // matrix.experts for matrix in experts.matrices]
        aligned = [-(-each // ALIGNMENT) * ALIGNMENT for each in self.each]
        self.offsets = [0, aligned[0], aligned[0] + aligned[1]]  # of the pieces in the staging
        self.bytes = sum(aligned)
        self._slot_biases = slots.biases
        self._biases = None
        if experts.biases is not None:
            self._biases = tuple(bias.to(device) for bias in experts.biases)

    def copy_biases(self, place: int, slot: int) -> None:
        if self._biases is None:
            return
        assert self._slot_biases is not None
        for target, source in zip(self._slot_biases, self._biases, strict=True):
            target[slot].copy_(source[place])


def _kind_of(matrix: Matrix) -> tuple[int, int, int]:
    return matrix.type, matrix.rows, matrix.cols


def _expert_of(planes: Planes, slot: int) -> Planes:
    none = planes.scales
    return Planes(planes.type, 1, planes.rows, planes.cols, planes.codes[slot : slot + 1], none, none)

"""Streams RAM experts through the GPU in steps of many tokens: a layer's weights are copied while the previous layer
computes.

    copies   | layer 0 | layer 1 | layer 2 |        two buffers of panels, in turn
    GPU              | unpack 0, compute 0 | unpack 1, compute 1 |

A step streams all of a layer's RAM experts, or only the first ones in storage order and leaves the others to the pool.
Panels (`pinned_panels.py`) become planes on the GPU (`planes.panels_triton`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import Matrix
from moeserve.kernels.handoff import CpuExperts
from moeserve.kernels.launch import is_compiling_ahead
from moeserve.kernels.planes import Planes, empty_planes
from moeserve.kernels.planes.books import codebook_on
from moeserve.kernels.planes.panels_triton import unpack_panels
from moeserve.models.loading.expert_maps import RAM, ExpertMaps
from moeserve.models.loading.gpu_weights import GpuExperts
from moeserve.models.loading.node_pieces import NodePiece, PieceUnpacker, pieces_of
from moeserve.models.loading.pinned_panels import PinnedPanels
from moeserve.quantization import QUANT_TYPES

ALIGNMENT = 256


class ExpertStream:
    """Streams the layers of a step in order: call `begin`, then `take` for each layer that streams."""

    def __init__(
        self,
        layers: Sequence[CpuExperts | None],
        panels: PinnedPanels,
        device: torch.device,
        maps: ExpertMaps | None = None,
    ) -> None:
        """maps: given if experts move between RAM and GPU memory; then only experts that the pool has at the time of
        the step are streamed."""
        self._is_gpu = device.type == "cuda"
        self._panels, self._maps = panels, maps
        some = [layer for layer in layers if layer is not None]
        nowhere = torch.full_like(some[0].expert_map, -1)
        # int32 [layers, experts]: the place in RAM of the pool's experts, -1 for others.
        places = [(nowhere if e is None else e.expert_map).cpu().numpy() for e in layers]
        self._in_ram = np.stack(places) if maps is None else maps.host[RAM].copy()
        # int32 [2, layers, experts]: index of streamed experts in the result of `take`; place in RAM of the others.
        shape = (2, *self._in_ram.shape)
        self._split_on_host = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._is_gpu)
        self._split_on_host[1] = torch.from_numpy(self._in_ram)
        split = self._split_on_host.to(device, copy=True)
        self._streamed: Tensor = split[0]
        self._left: Tensor = split[1]
        self._counts = [0] * len(layers)
        # Per layer, the places in RAM that the step streams, as ascending runs: (first, count).
        self._runs: list[list[tuple[int, int]]] = [[] for _ in layers]
        self._biases = [_biases_on(layer, device) for layer in layers]
        most = [int((places >= 0).sum()) for places in self._in_ram]
        raw = max(
            sum(_aligned(m.bytes // m.experts * count) for m in layer.own_matrices)
            for layer, count in zip(layers, most, strict=True)
            if layer is not None
        )
        self._raw = [torch.empty(raw, dtype=torch.uint8, device=device) for _ in "ab"]
        planes = torch.empty(
            max(
                sum(_planes_bytes(m, count) for m in layer.own_matrices)
                for layer, count in zip(layers, most, strict=True)
                if layer is not None
            ),
            dtype=torch.uint8,
            device=device,
        )
        # Views, made once to save host time: the thread that launches steps shares a core with a thread of the pool.
        self._buffers = [
            None if layer is None else _Buffers.within(self._raw, planes, layer.own_matrices, count)
            for layer, count in zip(layers, most, strict=True)
        ]
        self._order: list[int] = []
        self._next = 0  # index in `_order` of the layer to copy next
        self._taken = 0
        if self._is_gpu:
            self._copier = torch.cuda.Stream()
            self._copied = [torch.cuda.Event() for _ in "ab"]
            self._repacked = [torch.cuda.Event() for _ in "ab"]

    @property
    def idle_buffer(self) -> Tensor:
        """Returns a buffer, uint8 on the device, that is unused between two steps and during steps that stream
        nothing."""
        return self._raw[0]

    def begin(self, counts: Sequence[int]) -> None:
        """Begins a step that streams counts[layer] of each layer's RAM experts, the first by index. Starts the first
        two copies."""
        self._split(list(counts))
        self._order = [layer for layer, count in enumerate(counts) if count]
        self._next = self._taken = 0
        for _ in "ab":
            self._launch_copy()

    def take(self, layer: int) -> GpuExperts:
        """Launches the unpacking of a layer's experts on the current stream, after their copy, and then the copy of the
        layer after the next. Returns the unpacked experts. They are valid until the next call; entries for experts that
        are not streamed are undefined."""
        assert self._order[self._taken] == layer
        buffer = self._taken % 2
        self._taken += 1
        buffers = self._buffers[layer]
        assert buffers is not None
        if self._is_gpu:
            torch.cuda.current_stream().wait_event(self._copied[buffer])
        buffers.unpack(buffer, self._counts[layer])
        if self._is_gpu:
            self._repacked[buffer].record()
        self._launch_copy()
        *inputs, down = buffers.planes
        return GpuExperts(inputs[0], inputs[-1], down, self._biases_of(layer))  # without gates both are `up`

    def expert_map(self, layer: int) -> Tensor:
        """Returns int32 [experts of the layer]: indices in the result of `take`, -1 for experts that are not in it."""
        return self._streamed[layer]

    def left(self, layer: int) -> Tensor:
        """Returns int32 [experts of the layer]: indices in RAM of experts that the step does not stream, -1 for all
        others."""
        return self._left[layer]

    def _split(self, counts: list[int]) -> None:
        in_ram = self._in_ram if self._maps is None else self._maps.host[RAM]
        if counts == self._counts and np.array_equal(in_ram, self._in_ram):
            return
        self._counts, self._in_ram = counts, in_ram.copy()
        streamed, left = self._split_on_host.numpy()
        streamed[:], left[:] = -1, self._in_ram
        for layer, count in enumerate(counts):
            by_place = np.argsort(np.where(self._in_ram[layer] >= 0, self._in_ram[layer], 1 << 30))[:count]
            streamed[layer, by_place], left[layer, by_place] = np.arange(count), -1
            self._runs[layer] = _runs(self._in_ram[layer, by_place].tolist())
        self._streamed.copy_(self._split_on_host[0], non_blocking=True)
        self._left.copy_(self._split_on_host[1], non_blocking=True)

    def _biases_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns the biases in the order of `take`'s result."""
        biases = self._biases[layer]
        if biases is None or all(first == 0 for first, _ in self._runs[layer]):
            return biases  # those of the first experts
        places = [first + i for first, count in self._runs[layer] for i in range(count)]
        gate, up, down = (bias[places] for bias in biases)
        return gate, up, down

    def _launch_copy(self) -> None:
        if self._next == len(self._order):
            return
        buffer, layer = self._next % 2, self._order[self._next]
        self._next += 1
        if not self._is_gpu:
            self._copy(layer, buffer)
            return
        with torch.cuda.stream(self._copier):
            self._copier.wait_event(self._repacked[buffer])
            self._copy(layer, buffer)
            self._copied[buffer].record()

    def _copy(self, layer: int, buffer: int) -> None:
        if is_compiling_ahead():
            return
        buffers = self._buffers[layer]
        assert buffers is not None
        for source, target, pieces in zip(
            self._panels.of(layer), buffers.panels[buffer], buffers.pieces, strict=True
        ):
            for piece in pieces:
                own, at = source[piece.start :], buffers.experts * piece.offset
                for first, count in self._runs[layer]:
                    run = own[first * piece.each : (first + count) * piece.each]
                    target[at : at + len(run)].copy_(run, non_blocking=True)
                    at += len(run)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """A layer's matrices within the buffers that all layers share. Panels lie there node by node, as in RAM."""

    experts: int  # that fit
    panels: list[list[Tensor]]  # for each of the two buffers, the bytes of each matrix
    planes: list[Planes]
    pieces: list[list[NodePiece]]  # of each matrix
    unpackers: list[list[PieceUnpacker]]  # for each of the two buffers; empty with one NUMA node

    @classmethod
    def within(cls, raw: list[Tensor], planes: Tensor, matrices: Sequence[Matrix], experts: int) -> _Buffers:
        """Returns the stream's buffers for one layer as views of a step's memory. raw: two flat uint8 tensors on the
        device, for copies; planes: a flat uint8 tensor on the device, for unpacked experts; experts: number of experts
        that fit."""
        panels: list[list[Tensor]] = [[] for _ in raw]
        repacked: list[Planes] = []
        at = used = 0
        each = [matrix.bytes // matrix.experts for matrix in matrices]
        for matrix, one in zip(matrices, each, strict=True):
            for found, buffer in zip(panels, raw, strict=True):
                found.append(buffer[at : at + experts * one])
            repacked.append(_planes_in(planes[used:], matrix, experts))
            at += _aligned(experts * one)
            used += _planes_bytes(matrix, experts)
        pieces = [pieces_of(matrix) for matrix in matrices]
        unpackers = [
            [
                PieceUnpacker(memory[experts * piece.offset :], stack, piece)
                for memory, stack, of in zip(found, repacked, pieces, strict=True)
                for piece in of
                if len(of) > 1
            ]
            for found in panels
        ]
        return cls(experts, panels, repacked, pieces, unpackers)

    def unpack(self, buffer: int, experts: int) -> None:
        """Launches the unpacking of the first `experts` experts that one of the two buffers holds."""
        for unpacker in self.unpackers[buffer]:
            unpacker.launch(experts)
        if not self.unpackers[buffer]:
            for source, planes in zip(self.panels[buffer], self.planes, strict=True):
                unpack_panels(source, planes, experts)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns ascending indices as runs of consecutive ones: (first, count)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and place == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs


def _biases_on(layer: CpuExperts | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    if layer is None or layer.biases is None:
        return None
    gate, up, down = (bias.to(device) for bias in layer.biases)
    return gate, up, down


def _planes_bytes(matrix: Matrix, experts: int) -> int:
    p = empty_planes(QUANT_TYPES[matrix.type], (experts, matrix.rows, matrix.cols), "meta")
    return sum(_aligned(tensor.nbytes) for tensor in (p.codes, p.scales, p.supers))


def _planes_in(buffer: Tensor, matrix: Matrix, experts: int) -> Planes:
    """Returns planes whose tensors are consecutive in the buffer."""
    kind, shape = QUANT_TYPES[matrix.type], (experts, matrix.rows, matrix.cols)
    p = empty_planes(kind, shape, "meta")
    at = 0
    placed = []
    for tensor in (p.codes, p.scales, p.supers):
        placed.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += _aligned(tensor.nbytes)
    if kind.plane_book is not None:
        placed[2] = codebook_on(kind, buffer.device)
    return Planes(kind, *shape, *placed)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

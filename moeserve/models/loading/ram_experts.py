"""Loads the experts of a GPU model that stay in RAM, into the CPU pool's panels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.handoff import CpuExperts
from moeserve.models.interface import ModelShape
from moeserve.models.loading.disk_slots import RamSlots, SlotsOnDisk, experts_on_disk, open_slots
from moeserve.models.loading.engine_types import check_cpu_types
from moeserve.models.loading.floats import read_floats
from moeserve.models.loading.orders import SharedOrders
from moeserve.models.loading.progress import OnProgress
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import expert_bias_tensors, expert_tensors


class RamExperts:
    """The experts in RAM, which the pool computes. In some layers RAM may have fewer slots than experts; the others
    are then on disk."""

    def __init__(
        self, stream: CpuStream, layers: list[CpuExperts | None], disk: _C.DiskExperts | None = None
    ) -> None:
        """disk: reads the experts of layers with fewer slots than experts; None: there are none."""
        self.stream = stream
        self.layers = layers
        self.disk = disk

    @property
    def slots(self) -> list[Matrix]:
        """The matrices that are slots for experts on disk."""
        on_disk = [layer for layer in self.layers if layer is not None and layer.num_on_disk]
        return [matrix for layer in on_disk for matrix in layer.own_matrices]

    def bytes_of(self, used: Tensor) -> int:
        """Returns the bytes of these experts' weights. used: bool [layers, experts]; all of them must be in RAM."""
        counts = used.sum(dim=1).tolist()
        return sum(
            count * sum(m.bytes for m in layer.own_matrices) // layer.gate.experts
            for layer, count in zip(self.layers, counts, strict=True)
            if layer is not None
        )

    def read(self) -> tuple[float, int]:
        """Reads the weights of all these experts once, to measure the memory's speed. Returns the seconds and the
        bytes."""
        matrices = [m for layer in self.layers if layer is not None for m in layer.own_matrices]
        start = time.perf_counter()
        for matrix in matrices:
            self.stream.read(matrix)
        self.stream.wait()
        return time.perf_counter() - start, sum(m.bytes for m in matrices)


def load_ram_experts(
    stream: CpuStream,
    source: ModelSource,
    shape: ModelShape,
    cpu_ids: Sequence[Sequence[int]],
    device: torch.device,
    progress: OnProgress,
    first_layer: int = 0,
    slots: RamSlots | None = None,
) -> RamExperts:
    """Loads into RAM the experts that the CPU pool computes for a GPU, and returns them. cpu_ids: for each layer from
    `first_layer` on the ids of its RAM experts, in storage order. device: the GPU. slots: which of them RAM holds;
    None: all.

    Raises ModelError for a type without CPU kernels or a file that cannot be read, and MemoryError.
    """
    on_disk: list[SlotsOnDisk | None] = []
    layers: list[CpuExperts | None] = []
    orders = SharedOrders()
    total = sum(1 for ids in cpu_ids if ids)
    for index, ids in enumerate(cpu_ids, first_layer):
        on_disk.append(None)
        if not ids:
            layers.append(None)
            continue
        moe = shape.layers[index].moe
        assert moe is not None
        names = expert_tensors(shape, index)
        check_cpu_types(source, names)
        count = len(ids) if slots is None else slots.counts[index]
        if count < len(ids):
            matrices = [_slots(stream, source, name, count) for name in names]
        else:
            matrices = [_pack(stream, source, name, ids, orders) for name in names]
        gate, up, down = matrices[0], matrices[-2], matrices[-1]  # without gates both are `up`
        if slots is not None and count < len(ids):
            pinned = sorted(ids.index(expert) for expert in slots.pinned[index])
            parts = experts_on_disk(source, [names[0], names[-2], names[-1]])
            on_disk[-1] = SlotsOnDisk((gate, up, down), parts, pinned, list(ids))
        expert_map = expert_map_of(ids, moe.num_experts, device)
        biases = _biases(source, index, ids) if moe.expert_bias else None
        num_on_disk = 0 if on_disk[-1] is None else len(ids)
        layers.append(
            CpuExperts(gate, up, down, expert_map, moe.activation, biases, moe.limit, moe.alpha, num_on_disk)
        )
        progress("packing experts into RAM", sum(layer is not None for layer in layers), total)
    disk = None if slots is None or not any(on_disk) else open_slots(stream, on_disk, slots.reading)
    return RamExperts(stream, layers, disk)


def expert_map_of(ids: Sequence[int], num_experts: int, device: torch.device) -> Tensor:
    """Returns int32 [num_experts]: each expert's index in `ids`, -1 if it is not there."""
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[torch.tensor(ids, dtype=torch.long)] = torch.arange(len(ids), dtype=torch.int32)
    return expert_map.to(device)


def _biases(source: ModelSource, layer: int, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (read_floats(source, name)[list(ids)] for name in expert_bias_tensors(layer))
    return gate, up, down


def _slots(stream: CpuStream, source: ModelSource, name: str, count: int) -> Matrix:
    tensor = source.tensors[name]
    _, rows, cols = tensor.shape
    return stream.slots(int(tensor.type), (count, rows, cols))


def _pack(
    stream: CpuStream, source: ModelSource, name: str, ids: Sequence[int], orders: SharedOrders
) -> Matrix:
    tensor = source.tensors[name]
    experts, rows, cols = tensor.shape
    data = source.data(name).reshape(experts, -1)
    if list(ids) == list(range(ids[0], ids[0] + len(ids))):
        chosen = data[ids[0] : ids[-1] + 1]
    else:
        chosen = np.ascontiguousarray(data[list(ids)])
    mine = tensor if tensor.order is None else replace(tensor, order=tensor.order[list(ids)])
    matrix = stream.pack(chosen, int(tensor.type), (len(ids), rows, cols), orders.of(mine))
    source.advise_done(name)
    return matrix

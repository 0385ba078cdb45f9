"""Layers whose experts move between RAM and slots, with the values that must lie in each."""

from __future__ import annotations

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from dataclasses import replace

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.handoff import CpuExperts
from moeserve.kernels.planes import Planes, dequantize, empty_planes
from moeserve.kernels.planes.from_panels import panels_to_planes
from moeserve.kernels.stream_operands import ThreadPlacement
from moeserve.models.loading.expert_maps import ExpertMaps
from moeserve.models.loading.expert_slots import ExpertSlots
from moeserve.models.loading.gpu_weights import GpuAttention, GpuExperts, GpuLayer, GpuMoe, GpuWeights
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.pinned_panels import PinnedPanels, panel_bytes
from moeserve.models.loading.ram_experts import RamExperts, expert_map_of
from moeserve.placement.expert_cache.policy import DECAY
from moeserve.quantization import QUANT_TYPES
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from tests.kernels.weights import random_weights

HIDDEN, WIDTH, EXPERTS, SLOTS = 64, 32, 6, 2
PINNED = 5  # of layer 1: in GPU memory alone
FLOATS, Q8 = (Type.F32, Type.BF16, Type.F32), (Type.Q8_0, Type.Q8_0, Type.F16)


class World:
    """Two layers with slots, and between them one whose experts are all in RAM."""

    def __init__(self, kinds: tuple[Type, Type, Type], nodes: int = 1, *, has_biases: bool = False) -> None:
        """nodes: NUMA nodes among which panels in RAM are divided. Gate and up have one panel, down has two."""
        self.device = torch.device(DEVICE)
        self.stream = CpuStream([ThreadPlacement(node) for node in range(nodes)])
        one_node = CpuStream(1)
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        none = torch.zeros(0)
        ram: list[CpuExperts | None] = []
        layers: list[GpuLayer] = []
        self.values = []
        self.in_ram: list[list[Matrix]] = []  # the same experts, packed for one node
        # float32 [experts, width] by layer and matrix
        self.biases = [[torch.randn(EXPERTS, rows) for rows, _ in shapes] for _ in range(3)]
        for layer in range(3):
            ids = [e for e in (3, 0, 4, 1, 2, 5) if layer != 2 or e != PINNED]
            slots = [0, 1] if layer == 0 else [1, PINNED] if layer == 2 else []
            weights = [
                random_weights(kind, EXPERTS, *shape, seed=10 * layer + i)
                for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
            ]
            whole = [w.pack(one_node) for w in weights]
            self.values.append([w.values() for w in weights])
            rows = [np.ascontiguousarray(w.rows) for w in weights]
            matrices, of_one_node = (
                [
                    stream.pack(np.ascontiguousarray(r[ids]), int(kind), (len(ids), *shape))
                    for r, kind, shape in zip(rows, kinds, shapes, strict=True)
                ]
                for stream in (self.stream, one_node)
            )
            self.in_ram.append(of_one_node)
            biases = [tuple(of[chosen] for of in self.biases[layer]) for chosen in (ids, slots)]
            in_ram = CpuExperts(*matrices, expert_map_of(ids, EXPERTS, self.device))
            ram.append(replace(in_ram, biases=biases[0]) if has_biases else in_ram)
            experts = GpuExperts(*(self._stack(m, slots) for m in whole)) if slots else None
            if experts is not None and has_biases:
                experts = replace(experts, biases=tuple(of.to(self.device) for of in biases[1]))
            router = MergedLinear(empty_planes(QUANT_TYPES[Type.F32], (EXPERTS, HIDDEN), self.device))
            moe = GpuMoe(none, router, experts, expert_map_of(slots, EXPERTS, self.device))
            layers.append(GpuLayer(GpuAttention(none, [], None, None, router), moe))
        self.weights = GpuWeights(None, layers, none, router)
        self.ram = RamExperts(self.stream, ram)
        self.maps = ExpertMaps(self.weights, self.ram, EXPERTS, self.device)
        self.panels = PinnedPanels(ram, self.device)
        own = [layer.moe.experts for layer in layers if layer.moe is not None]
        staging = torch.zeros(1 << 18, dtype=torch.uint8, device=self.device)
        self.slots = ExpertSlots(own, ram, self.panels, staging, self.maps.slots)
        self.movable = np.ones((3, EXPERTS), np.bool_)
        self.movable[1], self.movable[2, PINNED] = False, False
        self.counts = torch.zeros(3, EXPERTS, dtype=torch.int64, device=self.device)
        self.reads = np.zeros(3, np.int64)  # of the pool

    def _stack(self, matrix: Matrix, ids: list[int]) -> Planes:
        every = empty_planes(QUANT_TYPES[matrix.type], (EXPERTS, matrix.rows, matrix.cols), "cpu")
        panels_to_planes(panel_bytes(matrix), every)

        def of(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor[ids].clone() if tensor.numel() else tensor).to(self.device)

        return Planes(
            every.type, len(ids), every.rows, every.cols, of(every.codes), of(every.scales), of(every.supers)
        )

    def check(self) -> None:
        """On the device every expert has a slot or a place in RAM, and what lies there is the expert."""
        for index, (layer, in_ram) in enumerate(zip(self.weights.layers, self.ram.layers, strict=True)):
            assert layer.expert_map is not None
            assert in_ram is not None
            slots, places = layer.expert_map.tolist(), in_ram.expert_map.tolist()
            assert len({s for s in slots if s >= 0}) == sum(s >= 0 for s in slots)
            for expert, (slot, place) in enumerate(zip(slots, places, strict=True)):
                assert slot >= 0 or place >= 0, (index, expert)
                for m, name in enumerate(("gate", "up", "down")):
                    values = self.values[index][m][expert]
                    if slot >= 0:
                        assert layer.moe is not None
                        assert layer.moe.experts is not None
                        assert torch.equal(dequantize(getattr(layer.moe.experts, name), slot).cpu(), values)
                        if (biases := layer.moe.experts.biases) is not None:
                            assert torch.equal(biases[m][slot].cpu(), self.biases[index][m][expert])
                    else:
                        matrix = self.in_ram[index][m]
                        there = empty_planes(
                            QUANT_TYPES[matrix.type], (matrix.experts, matrix.rows, matrix.cols), "cpu"
                        )
                        panels_to_planes(panel_bytes(matrix), there)
                        assert torch.equal(dequantize(there, place), values)

    def cache(self) -> ExpertCache:
        """Everything that a step misses comes, whether it pays or not."""
        cache = ExpertCache(
            self.maps, self.slots, self.movable, self.counts, lambda layers: int(self.reads[layers].sum())
        )
        cache.policy = _C.ExpertCachePolicy(self.maps.on_gpu, self.movable, DECAY, -1e9)
        return cache

    def use(self, layer: int, *experts: int) -> None:
        """What a step counts, and what the pool does."""
        self.counts[layer, list(experts)] += 1
        slots = self.weights.layers[layer].expert_map
        assert slots is not None
        self.reads[layer] += int((slots[list(experts)] < 0).sum())

"""Where each expert is, in one tensor for all layers that a single copy renews between two steps.

Kernels read the maps from the device, those in CUDA graphs too: nothing is captured again when an expert moves. The
router's kernel reads a route's slot once, and what it found decides for the GPU and for the pool alike: so an expert
may enter the GPU's map while a step runs (`expert_slots.py`). It leaves only between two steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.models.loading.gpu_weights import GpuMoe, GpuWeights
from moeserve.models.loading.ram_experts import RamExperts

GPU, RAM = 0, 1

Ids = npt.NDArray[np.int64]


class ExpertMaps:
    """Owns the maps. An expert with a slot is the GPU's, any other the pool's. On the host one of an expert's two
    entries is -1; on the device the pool's map keeps the places of all experts in RAM, and slots go before."""

    def __init__(
        self, weights: GpuWeights, experts: RamExperts, num_experts: int, device: torch.device
    ) -> None:
        """Puts views of itself in place of the maps of the weights' and experts' layers. What lies in both memories
        becomes the GPU's."""
        is_gpu = device.type == "cuda"
        shape = (2, len(weights.layers), num_experts)
        self._pinned = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_gpu)
        self._device = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.host: npt.NDArray[np.int32] = self._pinned.numpy()
        for index, layer in enumerate(experts.layers):
            if layer is not None:
                self.host[RAM, index] = layer.expert_map.cpu().numpy()
                experts.layers[index] = replace(layer, expert_map=self._device[RAM, index])
        # int32 [layers, experts]: each expert's place among those in RAM, -1 for one that is not there at all.
        self.places: npt.NDArray[np.int32] = self.host[RAM].copy()
        for index, gpu_layer in enumerate(weights.layers):
            if gpu_layer.expert_map is None:
                continue
            assert isinstance(gpu_layer.ffn, GpuMoe)
            self.host[GPU, index] = gpu_layer.expert_map.cpu().numpy()
            ffn = replace(gpu_layer.ffn, expert_map=self._device[GPU, index])
            weights.layers[index] = replace(gpu_layer, ffn=ffn)
        self._device.copy_(self._pinned)
        self.host[RAM][self.host[GPU] >= 0] = -1
        # int32 [layers, experts] on the device: each expert's slot, -1 for those of the pool.
        self.slots: Tensor = self._device[GPU]
        self._pinned_slots = self._pinned[GPU]
        self._native = _C.HostMaps(self.host[GPU], self.host[RAM], self.places)

    @property
    def on_gpu(self) -> npt.NDArray[np.bool_]:
        """The experts that a step finds in GPU memory, [layers, experts]. A copy."""
        on_gpu: npt.NDArray[np.bool_] = self.host[GPU] >= 0
        return on_gpu

    def start(self, moves: Ids) -> Ids:
        """int64 [moves, 3]: the layer, who comes, who goes; from the next `publish` on the latter are the pool's. Gives
        int64 [moves, 4]: the layer, who comes, its place in RAM, its slot. ValueError for who has no slot or place."""
        return self._native.start(moves)

    def land(self, batch: Ids) -> None:
        """Enters the experts of a batch from `start`: from the next `publish` on they are on the GPU."""
        self._native.land(batch)

    def publish(self) -> None:
        """Launches the copy to the device. The maps may be changed again when a step launched behind it has ended."""
        self.slots.copy_(self._pinned_slots, non_blocking=True)

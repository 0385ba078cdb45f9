"""Where each expert is, in one tensor for all layers that a single copy renews between two steps.

Kernels read the maps from the device, those of recorded steps too: nothing is recorded again when an expert moves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from moeserve.models.loading.gpu_weights import GpuMoe, GpuWeights
from moeserve.models.loading.ram_experts import RamExperts

GPU, RAM = 0, 1

Ids = npt.NDArray[np.int64]


class ExpertMaps:
    """Owns the maps. An expert is computed where its map says so: by the GPU or by the pool, never by both."""

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
        self.host[RAM][self.host[GPU] >= 0] = -1
        self._device.copy_(self._pinned)

    @property
    def on_gpu(self) -> npt.NDArray[np.bool_]:
        """[layers, experts]: those that a step finds in GPU memory. A copy."""
        on_gpu: npt.NDArray[np.bool_] = self.host[GPU] >= 0
        return on_gpu

    def put(self, layers: Ids, experts: Ids, slots: Ids) -> None:
        """int64 [moves] each. From the next `publish` on the experts are the GPU's."""
        self.host[GPU, layers, experts], self.host[RAM, layers, experts] = slots, -1

    def remove(self, layers: Ids, experts: Ids) -> Ids:
        """int64 [moves] each. From the next `publish` on the experts are the pool's. Returns their slots."""
        slots: Ids = self.host[GPU, layers, experts].astype(np.int64)
        self.host[GPU, layers, experts] = -1
        self.host[RAM, layers, experts] = self.places[layers, experts]
        return slots

    def publish(self) -> None:
        """Launches the copy to the device. The maps may be changed again when a step launched behind it has ended."""
        self._device.copy_(self._pinned, non_blocking=True)

"""Maps each expert to its location; one tensor for all layers, updated by a single copy between two steps.

Kernels, also in CUDA graphs, read the maps on the device: nothing is recaptured when an expert moves. The router's
kernel reads the slot of a route once, and that value decides whether the GPU or the pool computes the route. So an
expert may be added to the GPU's map during a step (`expert_slots.py`); experts are removed only between two steps.
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
    """Maps each layer's experts to GPU slots and to their places in RAM. The GPU computes experts with a
    slot, the pool all others. On the host one of an expert's two entries is -1; on the device the pool's map
    keeps the indices of all experts in RAM, and slots take precedence."""

    def __init__(
        self, weights: GpuWeights, experts: RamExperts, num_experts: int, device: torch.device
    ) -> None:
        """Replaces the maps in the layers of `weights` and `experts` by views of its own. Experts in both memories
        are assigned to the GPU."""
        is_gpu = device.type == "cuda"
        shape = (2, len(weights.layers), num_experts)
        self._pinned = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_gpu)
        self._device = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.host: npt.NDArray[np.int32] = self._pinned.numpy()
        for index, layer in enumerate(experts.layers):
            if layer is not None:
                self.host[RAM, index] = layer.expert_map.cpu().numpy()
                experts.layers[index] = replace(layer, expert_map=self._device[RAM, index])
        # int32 [layers, experts]: each expert's index among those in RAM, -1 if it is not in RAM.
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
        # int32 [layers, experts] on the device: each expert's slot, -1 for the pool's experts.
        self.slots: Tensor = self._device[GPU]
        self._pinned_slots = self._pinned[GPU]
        self._native = _C.HostMaps(self.host[GPU], self.host[RAM], self.places)

    @property
    def on_gpu(self) -> npt.NDArray[np.bool_]:
        """Returns bool [layers, experts]: the experts that a step finds in GPU memory. A copy."""
        on_gpu: npt.NDArray[np.bool_] = self.host[GPU] >= 0
        return on_gpu

    def start(self, moves: Ids) -> Ids:
        """Starts moves, int64 [moves, 3]: layer, incoming expert, outgoing expert. After the next `publish` the
        pool computes the outgoing experts. Returns int64 [moves, 4]: layer, incoming expert, its index in RAM, its
        slot. Raises ValueError if an expert has no slot or index."""
        return self._native.start(moves)

    def land(self, batch: Ids) -> None:
        """Adds the experts of a batch from `start` to the maps: after the next `publish` they are on the GPU."""
        self._native.land(batch)

    def adopt(self, slots: npt.NDArray[np.int32]) -> None:
        """Takes over the exchanges that steps have made on the device. slots: int32 [layers, experts]: the device's
        map."""
        self.host[GPU] = slots
        self.host[RAM] = np.where(slots >= 0, -1, self.places)

    def publish(self) -> None:
        """Launches the copy to the device. The maps may be changed again once a step launched after this call has
        ended."""
        self.slots.copy_(self._pinned_slots, non_blocking=True)

"""Promotions to the GPU with a disk beneath RAM: only experts that RAM holds are promoted, and they keep their slots
there until they are copied."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moeserve.kernels import _C
from moeserve.models.loading.promotion_tables import Batch
from moeserve.models.loading.ram_experts import RamExperts
from moeserve.placement.expert_cache.policy import Mask


class DiskPromotions:
    """Holds the RAM slots of promoted experts until their copies are made. Called by the thread that launches the
    steps, between two of them."""

    def __init__(self, native: _C.DiskExperts, experts: RamExperts, places: npt.NDArray[np.int32]) -> None:
        """places: int32 [layers, experts]: each expert's index among those in RAM or on disk, -1 if it is not there."""
        self._native, self._places = native, places
        # The number of experts of each layer that has some on disk.
        self._on_disk = {
            index: layer.num_on_disk
            for index, layer in enumerate(experts.layers)
            if layer is not None and layer.num_on_disk
        }
        self._held: list[tuple[int, int]] = []

    def ready(self) -> Mask:
        """Returns bool [layers, experts]: the experts that `hold` accepts, all of them together."""
        ready: Mask = self._places >= 0
        for layer, count in self._on_disk.items():
            marks = np.zeros(count, np.bool_)
            self._native.mark_holdable(layer, marks)
            ready[layer] &= marks[self._places[layer]]
        return ready

    def hold(self, batch: Batch) -> Batch:
        """Returns the batch with the experts' indices replaced by their slots in RAM."""
        slots = batch.copy()
        for row, (layer, _, place, _) in enumerate(batch.tolist()):
            if layer in self._on_disk:
                slots[row, 2] = self._native.hold(layer, place)
                self._held.append((layer, place))
        assert (slots[:, 2] >= 0).all()
        return slots

    def release(self) -> None:
        """Lets go of all that is held."""
        for layer, place in self._held:
            self._native.release(layer, place)
        self._held.clear()

"""Slots in GPU memory whose experts change while steps run.

    between two steps    the old expert is removed from the maps                                  `free`
    during the next      panels are copied and repacked into the slot, beside the step            `fill`
                         experts that have arrived enter the device's map, group by group
    between two steps    when all have arrived, they enter the host's maps too          `filled`, ExpertMaps.land

No step reads a slot that is being written: the slot was removed from the maps before the step was launched, and the
copies wait for all work launched earlier. An expert enters the device's map when its weights are complete; the router's
kernel, which reads the map, runs before the kernels that read the slot. A batch is sorted by layer, so that most of its
experts have arrived when the next step reaches their layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.handoff import CpuExperts
from moeserve.kernels.launch import is_compiling_ahead
from moeserve.kernels.planes import Planes
from moeserve.kernels.planes.copies import copy_scattered, store_scattered
from moeserve.kernels.planes.from_panels import panels_to_planes
from moeserve.kernels.planes.panels_triton import unpack_scattered
from moeserve.models.loading.expert_fetch import ExpertFetch
from moeserve.models.loading.gpu_weights import GpuExperts
from moeserve.models.loading.pinned_panels import PinnedPanels
from moeserve.models.loading.promotion_tables import Batch, PromotionTables, SlotLayer, panels_of
from moeserve.quantization import QUANT_TYPES

GROUPS = 8  # per batch in a CUDA graph: the first group is usable after an eighth of the time
MOST = 256  # experts per batch, at most


class ExpertSlots:
    """Fills slots, one batch at a time. Called only from the thread that launches the steps."""

    def __init__(
        self,
        gpu: Sequence[GpuExperts | None],
        ram: Sequence[CpuExperts | None],
        panels: PinnedPanels,
        staging: Tensor,
        slot_map: Tensor,
    ) -> None:
        """gpu, ram: per layer, the slots and the experts in RAM; None for a layer without. staging: uint8 on the
        device, aligned, a buffer for a batch's panels; it must be free whenever `fill` is called. slot_map: int32
        [layers, experts] on the device, read by kernels."""
        device = staging.device
        self._is_gpu = device.type == "cuda"
        self._panels, self._slot_map = panels, slot_map  # keeps the panels pinned
        self._layers = [
            SlotLayer(slots, experts, device) if slots is not None and experts is not None else None
            for slots, experts in zip(gpu, ram, strict=True)
        ]
        some = [layer for layer in self._layers if layer is not None]
        expert = max(layer.bytes for layer in some)
        self.most = most = min(MOST, len(staging) // expert)  # experts per batch
        self._staging = staging[: most * expert].view(most, expert)
        self._can_capture = self._is_gpu and all(layer.is_quantised for layer in some)
        groups = GROUPS if self._can_capture else 1
        self._tables = PromotionTables(self._layers, panels, self._staging, most, groups, slot_map.shape[1])
        self._launch: Callable[[], None] | None = None  # replay of the batch's CUDA graph
        self._is_filling = False
        if self._is_gpu:
            self._copier, self._unpacker = torch.cuda.Stream(), torch.cuda.Stream()
            self._freed, self._done = torch.cuda.Event(), torch.cuda.Event()

    @property
    def is_filling(self) -> bool:
        """True while a batch is in progress."""
        return self._is_filling

    def fetch(
        self, places: npt.NDArray[np.int32], decay: float, rows: range, at_once: int
    ) -> ExpertFetch | None:
        """Returns what fetches experts within steps, into the same slots through the same staging buffer. places: int32
        [layers, experts], see `ExpertFetch`; decay: factor of the experts' scores per step; rows: of steps that fetch;
        at_once: experts of a layer, at most. Returns None if experts have float matrices, which are copied one by
        one."""
        if not all(layer is None or layer.is_quantised for layer in self._layers):
            return None
        sources = [
            None if layer is None else panels_of(self._panels, index)
            for index, layer in enumerate(self._layers)
        ]
        staging = self._staging[: min(at_once, places.shape[1] // 2)]
        return ExpertFetch(self._layers, sources, self._slot_map, places, staging, decay, rows)

    def bytes_of(self, layer: int) -> int:
        """Bytes of one expert in the copied format."""
        of = self._layers[layer]
        return 0 if of is None else of.bytes

    def free(self) -> None:
        """Marks the slots to be filled as free: work launched so far may read them, later work does not."""
        if self._is_gpu:
            self._freed.record()

    def fill(self, batch: Batch, sources: Batch | None = None) -> None:
        """Launches the copies beside the running step, after the work that `free` marked, in the order of the layers.
        sources: the batch with other places in RAM from which the experts' panels are copied; None: each expert is
        copied from its own place."""
        self._is_filling = True
        self._tables.write(batch if sources is None else sources)
        if not self._is_gpu:
            self._launch_all(batch)
            return
        with torch.cuda.stream(self._copier):
            self._copier.wait_event(self._freed)
            if self._launch is not None:
                self._launch()
            elif self._can_capture:
                self._tables.copy()
                self._launch_groups()
            else:
                self._launch_all(batch)
            self._done.record()

    def filled(self, *, wait: bool = False) -> bool:
        """Returns whether the batch is complete; work launched afterwards may read it. wait: wait for it."""
        if self._is_gpu:
            if wait:
                self._done.synchronize()
            elif not self._done.query():
                return False
            torch.cuda.current_stream().wait_event(self._done)
        self._is_filling = False
        return True

    def compile(self) -> None:
        """Launches every kernel that `fill` needs, so that it is compiled. Must be called inside `compile_ahead`."""
        assert is_compiling_ahead()
        self._launch_groups()

    def capture(self) -> None:
        """Captures a batch's launches in a CUDA graph, if possible. Must be called after `compile_ahead` and before the
        first `fill`."""
        if not self._can_capture:
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._copier, capture_error_mode="thread_local"):
            self._tables.copy()
            self._launch_groups()
        self._launch = graph.replay

    def _launch_groups(self) -> None:
        """Launches all groups; a group is repacked while the next one is copied."""
        for group in self._tables.groups:
            copy_scattered(group.copies)
            if not self._is_gpu or is_compiling_ahead():
                self._unpack(group.addresses)
                store_scattered(self._slot_map, group.entries)
                continue
            self._unpacker.wait_stream(self._copier)
            with torch.cuda.stream(self._unpacker):
                self._unpack(group.addresses)
                store_scattered(self._slot_map, group.entries)
        if self._is_gpu and not is_compiling_ahead():
            self._copier.wait_stream(self._unpacker)

    def _launch_all(self, batch: Batch) -> None:
        """Launches a batch as one group, kernel by kernel."""
        (group,) = self._tables.groups
        self._tables.copy()
        copy_scattered(group.copies)
        rows = self._tables.matrices(batch)
        self._unpack([of_kind[:count] for of_kind, count in zip(group.addresses, rows, strict=True)])
        for i, (layer, _, _, slot) in enumerate(batch.tolist()):
            self._finish(layer, slot, self._staging[i])
        store_scattered(self._slot_map, group.entries)

    def _finish(self, layer: int, slot: int, staging: Tensor) -> None:
        """Copies the matrices that need no unpacking, those of floats."""
        of = self._layers[layer]
        assert of is not None
        for kind, planes, offset, each in zip(of.kinds, of.planes, of.offsets, of.each, strict=True):
            if QUANT_TYPES[kind[0]].planes_form is None:
                panels_to_planes(staging[offset : offset + each], _expert_of(planes, slot))

    def _unpack(self, addresses: Sequence[Tensor]) -> None:
        for kind, rows in zip(self._tables.kinds, addresses, strict=True):
            quant_type = QUANT_TYPES[kind[0]]
            if quant_type.planes_form is not None and len(rows):
                unpack_scattered(rows, quant_type, *kind[1:])


def _expert_of(planes: Planes, slot: int) -> Planes:
    none = planes.scales
    return Planes(planes.type, 1, planes.rows, planes.cols, planes.codes[slot : slot + 1], none, none)

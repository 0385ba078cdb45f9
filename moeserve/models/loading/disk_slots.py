"""Finds the layers whose experts stay on disk and get slots in RAM, and opens them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream, Matrix
from moeserve.kernels.disk_experts import DiskExpertLayer, DiskPart, Reading, open_disk_experts
from moeserve.models.errors import ModelError, replaced_error
from moeserve.models.loading.cpu_weights import ExpertsOnDisk
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.regular_file import FileVersion
from moeserve.models.sources.source import ModelSource


class RamSlots(NamedTuple):
    """The experts of each layer that RAM holds, and how the others are read."""

    counts: Sequence[int]
    pinned: Sequence[Collection[int]]  # experts that stay
    reading: Reading


class SlotsOnDisk(NamedTuple):
    """A layer's slots in RAM, and its experts on disk."""

    matrices: tuple[Matrix, Matrix, Matrix]  # gate, up, down
    on_disk: ExpertsOnDisk
    pinned: Sequence[int]  # ascending
    numbers: Sequence[int] = ()  # each expert's number in the file; empty: the same number

    @property
    def own_matrices(self) -> tuple[Matrix, ...]:
        """The matrices, each once: in experts without gates, `gate` and `up` are the same matrix."""
        return tuple(dict.fromkeys(self.matrices))

    @property
    def native(self) -> DiskExpertLayer:
        gate, up, down = (
            DiskPart(matrix, at.path, at.offset, at.stride)
            for matrix, at in zip(self.matrices, self.on_disk.in_file, strict=True)
        )
        num_experts = len(self.numbers) or self.on_disk.num_experts
        return DiskExpertLayer(num_experts, (gate, up, down), self.pinned, self.numbers)


def open_slots(stream: CpuStream, layers: Sequence[SlotsOnDisk | None], reading: Reading) -> _C.DiskExperts:
    """Allocates the slots' memory, starts the reading threads and reads the pinned experts; returns the object that
    reads missing experts. layers: None for a layer without experts on disk. Raises ModelError for a file that cannot be
    opened or read, or that was replaced since it was loaded."""
    files = {at.path: at.version for layer in layers if layer is not None for at in layer.on_disk.in_file}
    path = next(iter(files))
    try:
        native = open_disk_experts(stream, [layer and layer.native for layer in layers], reading)
        for path, version in files.items():
            if FileVersion.of(path) != version:
                raise replaced_error(path)
    except OSError as error:
        raise ModelError(path, f"its experts cannot be read: {error}") from error
    return native


def num_slots_of(
    source: ModelSource, slots: Sequence[int] | None, layer: int, parts: tuple[str, ...]
) -> int | None:
    """Returns the number of RAM slots for a layer's experts; None if all of them are loaded into RAM. slots: the number
    for each layer; None if no experts are on disk. parts: names of an expert's matrices."""
    if slots is None or parts not in (n.EXPERT_PARTS, n.UNGATED_EXPERT_PARTS) or layer >= len(slots):
        return None
    num_experts = source.tensors[n.of_layer(layer, parts[0])].shape[0]
    return slots[layer] if slots[layer] < num_experts else None


def experts_on_disk(source: ModelSource, names: Sequence[str]) -> ExpertsOnDisk:
    """Returns the positions of these three tensors in the file. Raises ModelError if the file does not have them in the
    form in which they are computed."""
    found = []
    for name in names:
        at = source.experts_in_file(name)
        if at is None:
            raise ModelError(
                source.path,
                f"{name}: experts on disk need a GGUF file that contains the weights; use one, or leave "
                "--load-format dummy out",
            )
        found.append(at)
    gate, up, down = found
    return ExpertsOnDisk(source.tensors[names[0]].shape[0], (gate, up, down))

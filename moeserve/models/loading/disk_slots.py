"""Finds the layers whose experts stay on disk and get slots in RAM."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.models.errors import ModelError
from moeserve.models.loading.cpu_weights import ExpertsOnDisk
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def num_slots_of(
    source: ModelSource, slots: Sequence[int] | None, layer: int, parts: tuple[str, ...]
) -> int | None:
    """Returns the number of RAM slots for a layer's experts; None if all its experts are loaded. slots: number by
    layer; None: all layers are loaded."""
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
            raise ModelError(source.path, f"{name}: experts on disk need a GGUF file with its own weights")
        found.append(at)
    gate, up, down = found
    return ExpertsOnDisk(source.tensors[names[0]].shape[0], (gate, up, down))

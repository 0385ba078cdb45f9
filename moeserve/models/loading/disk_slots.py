"""Which experts of a file get slots in RAM instead of being loaded."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.models.errors import ModelError
from moeserve.models.loading.cpu_weights import ExpertsOnDisk
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def num_slots_of(
    source: ModelSource, slots: Sequence[int] | None, layer: int, parts: tuple[str, ...]
) -> int | None:
    """Returns how many slots these parts of a layer get; None: they are loaded. slots: by layer, or None."""
    if slots is None or parts not in (n.EXPERT_PARTS, n.UNGATED_EXPERT_PARTS) or layer >= len(slots):
        return None
    num_experts = source.tensors[n.of_layer(layer, parts[0])].shape[0]
    return slots[layer] if slots[layer] < num_experts else None


def experts_on_disk(source: ModelSource, names: Sequence[str]) -> ExpertsOnDisk:
    """Returns where the file has these three tensors. Raises ModelError if it does not have them as they are used."""
    found = []
    for name in names:
        at = source.experts_in_file(name)
        if at is None:
            raise ModelError(source.path, f"{name}: experts on disk need a GGUF file with its own weights")
        found.append(at)
    gate, up, down = found
    return ExpertsOnDisk(source.tensors[names[0]].shape[0], (gate, up, down))

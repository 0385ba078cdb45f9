"""What decoders do to the KV of single tokens beside attention."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.kernels.stream_operands import KvLayer


def clear_slots(layers: Sequence[KvLayer], slots: list[int]) -> None:
    """Zeros in these slots, in all layers that have any."""
    for layer in layers:
        if not len(layer.keys):  # it does not attend
            continue
        for tensor in layer.tensors:
            tensor[slots] = 0

"""Clears KV slots after dummy steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.attention import AttentionShape
from moeserve.models.interface import ModelShape


def clear_slots(layer: KvLayer, slots: list[int]) -> None:
    """Zeroes these slots, in the tensors that have rows for them."""
    for tensor in layer.tensors:
        if layer.block > 1:
            slots = [slot for slot in slots if slot < len(tensor)]
        if len(tensor):
            tensor.view(torch.uint8)[slots] = 0  # not every operation supports 8-bit dtypes


def forget_kv(
    shape: ModelShape,
    first: int,
    layers: Sequence[KvLayer],
    slots: list[int],
    window_slots: list[int] | None,
) -> None:
    """Zeroes these KV slots in the layers from `first` on. window_slots: the slots to zero in windowed layers; None:
    the same slots."""
    for index, layer in enumerate(layers, start=first):
        mixer = shape.loaded_layers[index].mixer
        is_windowed = isinstance(mixer, AttentionShape) and mixer.window > 0 and index < shape.num_layers
        clear_slots(layer, slots if window_slots is None or not is_windowed else window_slots)

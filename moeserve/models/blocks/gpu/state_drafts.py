"""Drafts in recurrent layers: their changes of the states are recorded, and applied once it is known which are
accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.kernels.delta_net import op as delta_net
from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.mamba2 import op as mamba2
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.short_conv import op as short_conv
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import gpu_draft_records


def recurrent_layers(shape: ModelShape, count: int) -> list[int]:
    """Returns which of the model's last `count` layers are recurrent, numbered from the first of these."""
    layers = shape.layers[shape.num_layers - count :]
    return [i for i, layer in enumerate(layers) if layer.recurrence is not None]


class GpuStateDrafts:
    """The records of one step's drafts, of all recurrent layers."""

    def __init__(self, shape: ModelShape, states: Sequence[StateLayer], drafts: int) -> None:
        """shape: the model. states: one per layer on this GPU, which are the model's last, and some recurrent. drafts:
        maximum number per step."""
        assert shape.recurrence is not None
        self._heads = shape.recurrence.heads
        self._states, device = states[0].states, states[0].states.device
        recurrent = recurrent_layers(shape, len(states))
        of_layer = gpu_draft_records(shape, drafts).shape
        self._records = torch.zeros(len(recurrent), *of_layer, device=device)
        self._places = {index: place for place, index in enumerate(recurrent)}
        firsts = [states[index].first for index in recurrent]
        self._layer_first = torch.tensor(firsts, dtype=torch.int32, device=device)

    def of_layer(self, index: int) -> Tensor:
        """Returns a layer's records: float32 [drafts, values]. index: of the layer, from 0."""
        return self._records[self._places[index]]

    def commit(self, moved: Tensor, count: int) -> None:
        """Launches the changes of `count` sequences' recurrent states by accepted drafts. moved: int32, on the GPU; see
        delta_net's `commit_drafts`."""
        records, heads = (self._records, self._states, self._layer_first, moved, count), self._heads
        if isinstance(heads, DeltaHeads):
            delta_net.commit_drafts(*records, heads)
        elif isinstance(heads, Mamba2Heads):
            mamba2.commit_drafts(*records, heads)
        else:
            short_conv.commit_drafts(*records, heads)

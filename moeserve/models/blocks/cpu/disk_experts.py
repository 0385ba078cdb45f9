"""Reads a decoder's experts on disk, and guesses which experts the next layer will choose.

The next layer's router is applied early, to what that layer would read from the residual before this layer's
feed-forward is added. It mostly chooses the same experts as it does later. The guess decides only which experts are
read ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.disk_experts import Reading
from moeserve.kernels.stream_operands import Activations, DiskLayer, RoutingWorkspace
from moeserve.models.blocks.cpu.residual import read_ahead
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_weights import (
    CpuLayer,
    CpuSinkhornMix,
    CpuStreamMix,
    ExpertsOnDisk,
    GatedExperts,
)
from moeserve.models.loading.disk_slots import SlotsOnDisk, open_slots
from moeserve.models.residual import AttentionResiduals, HyperConnections, SinkhornConnections

# The most tokens of a step for which the next layer's experts are guessed. More tokens use most of the experts anyway.
MOST_GUESSED_TOKENS = 8


class CpuDiskExperts:
    """Reads missing experts from disk for the CPU engine's steps, when the decoder asks for a layer. Owns the
    reading threads and the guesses' buffers."""

    def __init__(
        self,
        stream: CpuStream,
        shape: ModelShape,
        layers: Sequence[CpuLayer],
        reading: Reading,
        pinned: Sequence[Iterable[int]] | None = None,
    ) -> None:
        """layers: the model's layers; some have experts on disk. pinned: by layer, the experts that stay in RAM; None:
        no expert does. Raises ModelError for a file that cannot be opened or read, or that was replaced since it was
        loaded."""
        self._stream = stream
        self._shapes, self._layers, self._eps = shape.loaded_layers, layers, shape.rms_eps
        found = [_experts_on_disk(layer) for layer in layers]
        stays = [()] * len(layers) if pinned is None else pinned
        slots = [
            f and SlotsOnDisk((f[0].gate, f[0].up, f[0].down), f[1], sorted(own))
            for f, own in zip(found, stays, strict=True)
        ]
        self.native = open_slots(stream, slots, reading)
        self.slots = [matrix for layer in slots if layer is not None for matrix in layer.own_matrices]
        self._num_experts = [0 if f is None else f[1].num_experts for f in found]
        on_disk = [index for index, count in enumerate(self._num_experts) if count]
        # By layer, the next one with experts on disk.
        self._next: dict[int, int | None] = dict(zip(on_disk, [*on_disk[1:], None], strict=True))
        self._y = Activations(MOST_GUESSED_TOKENS, shape.hidden_size)
        self._logits = torch.empty(MOST_GUESSED_TOKENS, shape.num_experts)
        self._weights = torch.empty(MOST_GUESSED_TOKENS, _stream_weights(shape))
        self._routing = RoutingWorkspace(MOST_GUESSED_TOKENS, shape.num_experts, shape.top_k)

    def layer(self, index: int, n: int, space: CpuWorkspace) -> DiskLayer | None:
        """Launches the guess of the next layer's experts for a step of n tokens. Returns what `CpuStream.experts` needs
        for layer `index`; None if its experts are in RAM."""
        if index >= len(self._layers) or not self._num_experts[index]:
            return None
        ahead = self._next[index]
        guess = None if ahead is None or n > MOST_GUESSED_TOKENS else self._guess(ahead, n, space)
        return DiskLayer(self.native, index, self._num_experts[index], guess, ahead or 0)

    def _guess(self, index: int, n: int, space: CpuWorkspace) -> torch.Tensor | None:
        w, shape = self._layers[index].moe, self._shapes[index].moe
        assert w is not None
        assert shape is not None
        norm = w.norm if w.parts is None else w.parts.router_input
        if w.by_token is not None:
            return None
        if isinstance(norm, CpuStreamMix | CpuSinkhornMix):
            read_ahead(self._stream, norm, self._eps, n, space, self._y, self._weights)
        elif isinstance(norm, torch.Tensor):
            self._stream.norm(space.x, norm, self._eps, n, self._y)
        else:
            return None
        self._stream.linear(self._y, n, w.router, [self._logits])
        self._stream.route(self._logits, n, self._routing, shape.router, bias=w.choice_bias)
        return self._routing.ids


def _stream_weights(shape: ModelShape) -> int:
    """Returns the number of weights with which a block's output is added to the streams of a token's residual."""
    match shape.streams:
        case None | AttentionResiduals():
            return 0
        case HyperConnections(count=count):
            return count
        case SinkhornConnections() as streams:
            return streams.added_values


def has_experts_on_disk(layers: Sequence[CpuLayer]) -> bool:
    return any(_experts_on_disk(layer) is not None for layer in layers)


def _experts_on_disk(layer: CpuLayer) -> tuple[GatedExperts, ExpertsOnDisk] | None:
    if layer.moe is None or layer.moe.experts.on_disk is None:
        return None
    return layer.moe.experts, layer.moe.experts.on_disk

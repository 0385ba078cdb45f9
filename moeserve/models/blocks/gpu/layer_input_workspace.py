"""The buffers of a step for per-layer embeddings, on the GPU."""

from __future__ import annotations

from torch import Tensor

from moeserve.models.blocks.gpu.arena_views import activations


class LayerInputWorkspace:
    """Additional buffers of per-layer embeddings."""

    def __init__(self, views: dict[str, Tensor]) -> None:
        self.all = views["layer_inputs"]  # float32 [rows, layers * width]: every layer's input
        self.projected = views["layer_inputs_projected"]
        # Of the layer that is being computed: its gate's product, and its input after the gate.
        self.gate = views["layer_input_gate"]
        self.gated = activations(views, "layer_input")

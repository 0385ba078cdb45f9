"""The buffers of a GPU's step for per-layer embeddings. No torch."""

from __future__ import annotations

from moeserve.models.buffers import Buffer, activation_buffers
from moeserve.models.interface import ModelShape


def layer_input_buffers(
    model: ModelShape, rows: int, acts: str, wide: str, *, quantised: bool
) -> list[Buffer]:
    """Returns the buffers for the inputs of all layers, and for the addition of one; an empty list for a model without
    such inputs. acts: dtype of activations; quantised: whether they are also stored as int8. wide: dtype between two
    products."""
    width = model.layer_input_width
    if not width:
        return []
    return [
        Buffer("layer_inputs", (rows, model.num_layers * width)),
        Buffer("layer_inputs_projected", (rows, model.num_layers * width), wide),
        Buffer("layer_input_gate", (rows, width), wide),
        *activation_buffers("layer_input", rows, width, acts, quantised=quantised),
    ]

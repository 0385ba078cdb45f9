"""The buffers of a GPU's step for experts between two matrices, narrower than the model. No torch."""

from __future__ import annotations

from moeserve.models.buffers import Buffer, activation_buffers
from moeserve.models.interface import ModelShape


def latent_expert_buffers(
    model: ModelShape, rows: int, acts: str, wide: str, *, quantised: bool
) -> list[Buffer]:
    """Returns the buffers of latent experts; an empty list for a model without latent experts. acts: dtype of
    activations; quantised: whether they are also stored as int8. wide: dtype between two products."""
    width = model.latent_expert_width
    if not width:
        return []
    return [
        Buffer("latent_product", (rows, width), wide),
        # The experts' input, then their sum as the second matrix reads it.
        *activation_buffers("latent_input", rows, width, acts, quantised=quantised),
        Buffer("latent_parts", (rows, 1 if quantised else model.top_k, width), wide),
        Buffer("latent_sum", (rows, width)),  # of the experts in RAM, then of all
        Buffer("latent_shared_ids", (rows, 1), "int32"),  # as expert_ids, of the shared expert's route
        Buffer("latent_shared_weights", (rows, 1)),
    ]

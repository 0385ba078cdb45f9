"""The buffers of a step for latent experts, on the GPU."""

from __future__ import annotations

from torch import Tensor

from moeserve.models.blocks.gpu.arena_views import activations


class LatentExpertsWorkspace:
    """Additional buffers of experts between two matrices."""

    def __init__(self, views: dict[str, Tensor]) -> None:
        self.product = views["latent_product"]
        self.input = activations(views, "latent_input")
        self.parts = views["latent_parts"]  # [rows, routes, latent]; for few rows [rows, 1, latent], the sum
        self.sum = views["latent_sum"]
        self.shared_ids = views["latent_shared_ids"]
        self.shared_weights = views["latent_shared_weights"]

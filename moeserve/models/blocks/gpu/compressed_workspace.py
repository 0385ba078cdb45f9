"""The buffers of compressed attention in a step on the GPU: views of the step's arena."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.latent.op import by_head
from moeserve.models.blocks.gpu.arena_views import activations
from moeserve.models.compressed_buffers import compressed_layers
from moeserve.models.interface import ModelShape


class EntryChoice:
    """The buffers of an indexer that chooses entries."""

    def __init__(self, views: dict[str, Tensor], heads: int) -> None:
        self.queries = views["index_queries"].view(len(views["index_queries"]), heads, -1)
        self.scores = views["index_scores"]
        self.chosen = views["chosen_keys"]  # blocks, [rows, 1, blocks of a row]
        self.lasts = views["last_keys"]
        rows = len(self.lasts)
        self.row_numbers = torch.arange(rows, dtype=torch.int32, device=self.lasts.device)


class CompressedWorkspace:
    """Additional buffers of compressed attention."""

    def __init__(self, views: dict[str, Tensor], model: ModelShape, rows: int) -> None:
        layers = compressed_layers(model)
        first = layers[0]
        self.q_a = activations(views, "q_a")
        self.q = views["compressed_q"]
        self.queries = views["q"].view(rows, first.num_heads, first.head_dim)
        self.attended = views["compressed_attended"]
        self.output = activations(views, "attended")  # result of the first output matrix
        self.by_group = by_head(rows, first.output_groups, self.q.device)
        heads = next((layer.indexer.num_heads for layer in layers if layer.indexer is not None), 0)
        self.choice = EntryChoice(views, heads) if heads else None


def compressed_workspace(
    views: dict[str, Tensor], model: ModelShape, rows: int
) -> CompressedWorkspace | None:
    """Returns the buffers of compressed attention for steps of `rows` rows, as views of the arena; None for a model
    without compressed attention."""
    return CompressedWorkspace(views, model, rows) if "compressed_q" in views else None

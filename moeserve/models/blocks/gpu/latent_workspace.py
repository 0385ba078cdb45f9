"""The buffers of latent attention and of indexers in a step on the GPU: views of the step's arena."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.latent.op import by_head
from moeserve.models.blocks.gpu.arena_views import activations
from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.latent import LatentAttentionShape


class LatentWorkspace:
    """Additional buffers of latent attention."""

    def __init__(self, views: dict[str, Tensor], shape: LatentAttentionShape, rows: int) -> None:
        heads = shape.num_heads
        self.q_a = activations(views, "q_a") if shape.q_rank else None
        self.q = views["latent_q"]
        self.nope = views["nope"].view(rows, heads, shape.nope_dim)
        self.queries = views["q"].view(rows, heads, shape.rank)
        self.rotated = views["rotated"].view(rows, heads, shape.rotary_dim)
        self.attended = views["latent_attended"].view(rows, heads, shape.rank)
        self.by_head = by_head(rows, heads, self.q.device)


class IndexerWorkspace:
    """Additional buffers of an indexer. A layer's choice stays until a layer chooses again."""

    def __init__(self, views: dict[str, Tensor], shape: IndexerShape | BlockIndexerShape, rows: int) -> None:
        self.projected = views["index_projected"]
        self.q = views["index_q"]  # of an indexer that chooses keys
        self.queries = views["index_queries"].view(rows, shape.num_heads, shape.dim)
        self.scores = views["index_scores"]
        # KV slots [rows, 1, keys], or blocks [rows, choices, blocks of a row]
        self.chosen = views["chosen_keys"]
        self.lasts = views["last_keys"]  # the index of each row's last chosen key
        self.row_numbers = torch.arange(rows, dtype=torch.int32, device=self.q.device)

"""Checks that widths are multiples of 32, the columns that kernels process at a time. The kernels do not check."""

from __future__ import annotations

from collections.abc import Mapping

from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.errors import SettingError
from moeserve.models.interface import ModelShape
from moeserve.models.residual import HyperConnections
from moeserve.models.sources.source import ModelSource

LANES = 32  # columns


def check_lanes(
    source: ModelSource, shape: ModelShape, engine: str, more: Mapping[str, int] | None = None
) -> None:
    """Raises ModelError for a width that `engine`'s kernels do not support. more: further widths of this engine, by
    key."""
    sizes = {
        **(more or {}),
        "embedding_length": shape.hidden_size,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_feed_forward_length": shape.shared_width,
        "feed_forward_length": shape.dense_width,
    }
    if shape.latent is not None:
        sizes |= shape.latent.sizes
    if isinstance(shape.heads, CompressedAttentionShape):
        for layer in shape.layers:
            sizes |= layer.mixer.sizes if isinstance(layer.mixer, CompressedAttentionShape) else {}
    if shape.indexer is not None:
        sizes["attention.indexer.key_length"] = shape.indexer.dim
    if shape.recurrence is not None:
        sizes |= shape.recurrence.sizes
    if isinstance(shape.streams, HyperConnections):
        sizes["hyper_connection.low_rank"] = shape.streams.low_rank
    if shape.ngrams is not None:
        sizes["numbers of a token's n-gram embeddings"] = shape.ngrams.width
    latents = (layer.moe.latent for layer in shape.layers if layer.moe is not None)
    sizes["moe_latent_size"] = max(latents, default=0)
    for name, size in sizes.items():
        if size % LANES:
            raise SettingError(
                source.path, f"{name} is {size}; the {engine} engine needs a multiple of {LANES}"
            )

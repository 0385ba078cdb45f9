"""Chooses the layer that drafts on a GPU: an EAGLE-3 head, the model's own next-token block, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.gpu.draft_head import GpuDraftHeadBlock, PlacedDraftHead
from moeserve.models.blocks.gpu.drafting_block import BlockSizes, GpuDraftingBlock, Heads
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.next_token import GpuNextTokenBlock
from moeserve.models.blocks.gpu.taps import ResidualTaps
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.loading.gpu_weights import GpuWeights


def drafting_block(
    shape: ModelShape,
    weights: GpuWeights,
    kv: Sequence[KvLayer],
    forms: Mapping[AttentionForm, GpuForm],
    heads: Heads,
    sizes: BlockSizes,
    draft_head: PlacedDraftHead | None,
    taps: ResidualTaps | None,
) -> GpuDraftingBlock | None:
    """Returns the drafting layer; None if nothing drafts. The arguments are those of the decoder. kv: the last one
    belongs to the drafting layer. taps: None without a draft_head."""
    if draft_head is not None:
        assert taps is not None
        return GpuDraftHeadBlock(draft_head, shape, weights, heads, taps, sizes)
    if weights.next_token is not None:
        return GpuNextTokenBlock(shape, weights, kv[-1], forms, heads, sizes)
    return None

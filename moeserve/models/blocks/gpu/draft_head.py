"""An EAGLE-3 head that drafts on a GPU: see models/eagle3/shape.py. drafting_block.py has the part that it shares with
the model's own next-token block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.latent.op import norm_rows
from moeserve.kernels.next_token.op import JoinNorms
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.gpu.attention import GpuAttentionBlock
from moeserve.models.blocks.gpu.drafting_block import (
    AddAndNorm,
    BlockMatrices,
    BlockSizes,
    GpuDraftingBlock,
    Heads,
    block_activations,
)
from moeserve.models.blocks.gpu.ffn import GpuFfnBlock
from moeserve.models.blocks.gpu.forms import forms_of
from moeserve.models.blocks.gpu.head_product import GpuHead, head_product
from moeserve.models.blocks.gpu.linear import multiply
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.taps import ResidualTaps
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace
from moeserve.models.eagle3.shape import DraftHeadShape
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_draft_head import GpuDraftHead
from moeserve.models.loading.gpu_weights import GpuAttention, GpuWeights, has_float_weights
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.unnormed import Unnormed
from moeserve.models.step_buffers import CHAIN_ROWS, step_sizes


@dataclass(frozen=True, slots=True)
class PlacedDraftHead:
    """An EAGLE-3 head on a GPU."""

    shape: DraftHeadShape
    weights: GpuDraftHead
    kv: KvLayer  # with the slots of the model's
    max_model_len: int

    def taps(self, model: ModelShape, rows: int, device: torch.device) -> ResidualTaps:
        """Returns the copies of the model's residual that the head reads, for steps of up to `rows` rows."""
        floats = head_floats(device)
        return ResidualTaps(self.shape.taps, model.num_layers, rows, model.hidden_size, floats, device)


def head_floats(device: torch.device) -> torch.dtype:
    """Returns the dtype of a head's products of many rows: not float16, whose range the residuals of some models
    exceed. Triton's interpreter has no bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class GpuDraftHeadBlock(GpuDraftingBlock):
    def __init__(
        self,
        head: PlacedDraftHead,
        model: ModelShape,
        weights: GpuWeights,
        heads: Heads,
        taps: ResidualTaps,
        sizes: BlockSizes,
    ) -> None:
        """model, weights: the shape and weights of the model that it drafts for. heads: the buffers of the model's
        head, by number of rows. taps: the decoder's copies of the residual."""
        w, own, device = head.weights, head.shape.own, sizes.slots_ahead.device
        sizes = replace(sizes, floats=head_floats(device))
        self._head, self._w, self._taps = head.shape, w, taps
        embedding, output = w.embedding or weights.embedding, w.output or weights.output
        assert embedding is not None
        assert output is not None
        matrices = BlockMatrices(
            embedding,
            model.embedding_scale if w.embedding is None else 1.0,
            output,
            heads if w.output is None else _own_heads(own, w.output, sizes, device),
            w.ids,
        )
        norms = JoinNorms(w.token_norm, w.state_norm, own.rms_eps)
        is_float = has_float_weights(replace(weights, layers=[w.layer]))
        super().__init__(own, matrices, norms, sizes, head.kv, float_weights=is_float)
        sums = GpuSums(None, [None], None)
        forms = forms_of(own, head.max_model_len, device, w.rope_factors)
        self._attention = GpuAttentionBlock(own.rms_eps, sizes.slots_ahead, forms)
        self._ffn = GpuFfnBlock(own, [w.layer], device, None, None, None, sums)
        tapped = len(head.shape.taps) * head.shape.target_size
        self._tapped = {size: block_activations(size, tapped, sizes.floats, device) for size in self._spaces}

    def _step_states(self, states: Tensor, count: Tensor, add_and_norm: AddAndNorm) -> None:
        n, taps = len(states), self._taps
        if taps.last is not None:
            add_and_norm(Unnormed(), count, GpuActivations(taps.last[:n], None, None), self._all_rows[:n])
            taps.copy_last(n)
        for rows, valid in self._parts(n, count):
            size = rows.stop - rows.start
            x, norm = self._tapped[size], self._w.joined_norm
            norm_rows(taps.rows[rows], norm, self._head.own.rms_eps, valid, x.x, x.codes, x.scales)
            multiply(self._w.joined, x, valid, states[rows], self._spaces[size].dense)

    def _store_joined(self, batch: GpuBatch, s: GpuWorkspace) -> None:
        joined = self._activate_joined(s, batch.count)
        self._attention.store(self._head.attention, self._mixer, self._kv, batch, s, joined)

    def _mix(self, batch: GpuBatch, s: GpuWorkspace, states: Tensor, final: GpuActivations) -> None:
        joined = self._activate_joined(s, batch.count)
        is_normed, hidden = self._head.norm_before_residual, self._head.own.hidden_size
        s.x.copy_(self._joined[: s.rows, hidden:] if is_normed else states)
        self._attention.attend(self._head.attention, self._mixer, self._kv, batch, s, None, joined)
        self._ffn.mix(0, s, batch)
        self._ffn.add_and_norm(0, s, self._w.output_norm, batch.count, final, None)
        assert final.x is not None
        states.copy_(final.x if self._head.norm_output else s.x)

    @property
    def _mixer(self) -> GpuAttention:
        mixer = self._w.layer.mixer
        assert isinstance(mixer, GpuAttention)
        return mixer


def _own_heads(own: ModelShape, output: MergedLinear, sizes: BlockSizes, device: torch.device) -> Heads:
    """Returns buffers and products for the head's own matrix, for as many rows as a chain may have."""
    most = step_sizes(min(len(sizes.slots_ahead) - 1, CHAIN_ROWS))
    logits = torch.zeros(most[-1], own.vocab_size, device=device)
    arena = torch.empty(0, dtype=torch.uint8, device=device)  # only residuals of several streams need one
    return {
        size: (
            GpuHead(own, logits, size, sizes.floats, arena),
            head_product(output, size, sizes.floats, device),
        )
        for size in most
    }

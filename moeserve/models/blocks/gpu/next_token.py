"""The model's next-token block on a GPU, which drafts: see models/next_token.py. drafting_block.py has the part that it
shares with an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.next_token.op import JoinNorms
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.gpu.drafting_block import (
    AddAndNorm,
    BlockMatrices,
    BlockSizes,
    GpuDraftingBlock,
    Heads,
)
from moeserve.models.blocks.gpu.ffn import GpuFfnBlock
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.layers import GpuLayers
from moeserve.models.blocks.gpu.linear import multiply
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.loading.gpu_weights import GpuWeights, has_float_weights
from moeserve.models.step_buffers import next_token_shape


class GpuNextTokenBlock(GpuDraftingBlock):
    def __init__(
        self,
        shape: ModelShape,
        weights: GpuWeights,
        kv: KvLayer,
        forms: Mapping[AttentionForm, GpuForm],
        heads: Heads,
        sizes: BlockSizes,
    ) -> None:
        """weights: the weights of the model. kv: the KV cache of the block. forms, heads: those of the decoder."""
        assert weights.next_token is not None
        assert weights.embedding is not None
        assert weights.output is not None
        self._w, self._model_norm = weights.next_token, weights.output_norm
        own, layer = next_token_shape(shape), weights.next_token.layer
        matrices = BlockMatrices(weights.embedding, own.embedding_scale, weights.output, heads)
        norms = JoinNorms(self._w.token_norm, self._w.state_norm, shape.rms_eps)
        is_float = has_float_weights(replace(weights, layers=[layer]))
        super().__init__(own, matrices, norms, sizes, kv, float_weights=is_float)
        sums, slots_ahead = GpuSums(None, [None], None), sizes.slots_ahead
        self._ffn = GpuFfnBlock(own, [layer], slots_ahead.device, None, None, None, sums)
        self._layers = GpuLayers(
            own, [layer], [kv], (), slots_ahead, None, dict(forms), self._ffn, sums, None
        )

    def _step_states(self, states: Tensor, count: Tensor, add_and_norm: AddAndNorm) -> None:
        rows = self._all_rows[: len(states)]
        add_and_norm(self._model_norm, count, GpuActivations(states, None, None), rows)

    def _store_joined(self, batch: GpuBatch, s: GpuWorkspace) -> None:
        self._project(s, batch.count)
        self._layers.norm_first(s, batch.count)
        self._layers.store(0, batch, s)

    def _mix(self, batch: GpuBatch, s: GpuWorkspace, states: Tensor, final: GpuActivations) -> None:
        self._project(s, batch.count)
        self._layers.forward(0, batch, s)
        self._ffn.add_and_norm(0, s, self._w.head_norm, batch.count, final, self._all_rows[: s.rows])
        assert final.x is not None
        states.copy_(final.x)

    def _project(self, s: GpuWorkspace, count: Tensor) -> None:
        """Launches x = eh_proj joined."""
        multiply(self._w.projection, self._activate_joined(s, count), count, s.x, s.dense)

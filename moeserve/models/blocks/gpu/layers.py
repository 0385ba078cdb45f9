"""The layers on a GPU: launches of a layer's token mixer and feed-forward, each with the norm before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeserve.kernels.embed.op import add_deep
from moeserve.kernels.norm.op import add_norm, add_to
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.models.attention import AttentionShape
from moeserve.models.blocks.gpu.attention import GpuAttentionBlock
from moeserve.models.blocks.gpu.compressed import GpuCompressedAttentionBlock
from moeserve.models.blocks.gpu.ffn import GpuFfnBlock
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.latent import GpuLatentAttentionBlock
from moeserve.models.blocks.gpu.lora import GpuAdapters
from moeserve.models.blocks.gpu.lora_products import LayerAdapters
from moeserve.models.blocks.gpu.mamba2 import recur_mamba2
from moeserve.models.blocks.gpu.ngrams import add_ngrams
from moeserve.models.blocks.gpu.recurrent import mix_recurrent
from moeserve.models.blocks.gpu.state_drafts import GpuStateDrafts
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.taps import ResidualTaps
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.loading.gpu_inputs import GpuInput, GpuStreams, norm_weight
from moeserve.models.loading.gpu_weights import (
    GpuAttention,
    GpuCompressedAttention,
    GpuLatentAttention,
    GpuLayer,
    GpuMamba2,
    GpuNgrams,
)
from moeserve.models.observer import LayerObserver
from moeserve.models.recurrence import Recurrence


class GpuLayers:
    """The decoder layers on this GPU: all of the model's, or its last if others are on the CPU or another GPU."""

    def __init__(
        self,
        shape: ModelShape,
        layers: Sequence[GpuLayer],
        kv: Sequence[KvLayer],
        states: Sequence[StateLayer],
        slot_table: Tensor,
        window_table: Tensor | None,
        forms: Mapping[AttentionForm, GpuForm],
        ffn: GpuFfnBlock,
        sums: GpuSums,
        adapters: GpuAdapters | None,
        state_drafts: GpuStateDrafts | None = None,
        taps: ResidualTaps | None = None,
    ) -> None:
        """Arguments: see `GpuDecoder`. layers: the weights. ffn, sums: those of the decoder. state_drafts: None if
        recurrent layers have no drafts. taps: None if no head reads the residual; the layers before which it is read
        must have mixers."""
        self._shape = shape
        self._layers = layers
        self._first_layer = shape.num_layers - len(layers)
        self._kv = kv
        self._states = states
        self._attention = GpuAttentionBlock(
            shape.rms_eps, slot_table, forms, window_table, full_layers_see_ahead=shape.full_layers_see_ahead
        )
        self._latent_attention = GpuLatentAttentionBlock(slot_table, forms)
        mixers = [layer.mixer for layer in shape.layers[self._first_layer :]]
        self._compressed_attention = GpuCompressedAttentionBlock(shape.rms_eps, slot_table, forms, mixers, kv)
        self._ffn = ffn
        self._sums = sums
        self._adapters = adapters
        self._state_drafts = state_drafts
        self._taps = taps

    def forward(self, index: int, batch: GpuBatch, s: GpuWorkspace) -> None:
        """Launches one layer. It reads s.x plus the output that the previous layer has left to be added. index: of the
        layer, from 0."""
        layer = self._layers[index]
        adapters = self._adapters_of(index, batch, s)
        if layer.ngrams is not None:
            self._add_ngrams(index, layer.ngrams, batch, s)
        if layer.mixer is None:
            self._take_over(index, layer, s, batch.count)
        else:
            self._add_and_norm(index, s, layer.mixer.norm, batch.count)
            if self._taps is not None:  # x is complete now
                self._taps.copy(self._first_layer + index, s.x)
            self._mix_tokens(index, layer, batch, s, adapters)
            self._sums.add_mixer(s)
        self._ffn.mix(index, s, batch, adapters)
        if s.deep is not None and (layer_number := self._first_layer + index) < self._shape.deep_layers:
            at = layer_number * self._shape.hidden_size  # the layer's own terms are added by the next norm
            add_deep(batch.token_ids, batch.count, s.deep[:, at : at + self._shape.hidden_size], s.x)

    def _mix_tokens(
        self,
        index: int,
        layer: GpuLayer,
        batch: GpuBatch,
        s: GpuWorkspace,
        adapters: LayerAdapters | None,
    ) -> None:
        """Launches a layer's token mixer. Reads s.y; writes the output to s.output."""
        w, mixer = layer.mixer, self._shape.layers[self._first_layer + index].mixer
        if isinstance(mixer, AttentionShape):
            assert isinstance(w, GpuAttention)
            self._attention.attend(mixer, w, self._kv_of(index, mixer), batch, s, adapters)
        elif isinstance(mixer, LatentAttentionShape):
            assert isinstance(w, GpuLatentAttention)
            self._latent_attention.attend(mixer, w, self._kv[index], batch, s)
        elif isinstance(mixer, CompressedAttentionShape):
            assert isinstance(w, GpuCompressedAttention)
            of_layer = (index, mixer, w, self._kv[index], self._states[index])
            self._compressed_attention.attend(*of_layer, batch, s)
        elif isinstance(mixer, Recurrence):
            assert w is not None
            assert batch.states is not None
            of_step = batch.states, batch.count, s, self._records(index)
            mix_recurrent(mixer, w, self._shape.rms_eps, self._states[index], *of_step)
        if layer.beside is not None:
            self._mix_beside(index, layer.beside, batch, s)

    def _mix_beside(self, index: int, w: GpuMamba2, batch: GpuBatch, s: GpuWorkspace) -> None:
        """Launches x += s.output, which attention has written, then the recurrence beside attention. Reads s.y; writes
        its output to s.output."""
        shape = self._shape.layers[self._first_layer + index].beside
        assert shape is not None
        assert batch.states is not None
        add_to(s.x, s.output, batch.count)
        recur_mamba2(shape, w, self._states[index], batch.states, batch.count, s, self._records(index))

    def _records(self, index: int) -> Tensor | None:
        return None if self._state_drafts is None else self._state_drafts.of_layer(index)

    def _kv_of(self, index: int, mixer: AttentionShape) -> KvLayer:
        """Returns the KV that a layer attends to: its own, or that of an earlier layer, which is on this GPU."""
        return self._kv[index if mixer.kv_from is None else mixer.kv_from - self._first_layer]

    def norm_first(self, s: GpuWorkspace, count: Tensor) -> None:
        """Launches y = norm of x, as the first layer reads it. count: int32 [1] on the device, the number of valid
        rows."""
        mixer = self._layers[0].mixer
        assert mixer is not None
        self._add_and_norm(0, s, mixer.norm, count)

    def store(self, index: int, batch: GpuBatch, s: GpuWorkspace) -> None:
        """Launches only the keys and values of an attention layer. Reads s.y, the norm of x. index: of the layer, from
        0."""
        w, mixer = self._layers[index].mixer, self._shape.layers[self._first_layer + index].mixer
        if isinstance(mixer, AttentionShape):
            assert isinstance(w, GpuAttention)
            self._attention.store(mixer, w, self._kv[index], batch, s)
        else:
            assert isinstance(mixer, LatentAttentionShape)
            assert isinstance(w, GpuLatentAttention)
            self._latent_attention.store(mixer, w, self._kv[index], batch, s)

    def _add_ngrams(self, index: int, w: GpuNgrams, batch: GpuBatch, s: GpuWorkspace) -> None:
        """Launches the addition of n-gram embeddings to x, after what the previous layer left."""
        if index:
            self._ffn.complete(index - 1, s, batch.count)
        assert batch.states is not None
        state, recurrence = self._states[index], self._shape.layers[self._first_layer + index].recurrence
        values = 0 if recurrence is None else recurrence.heads.state_values
        of_ngrams = StateLayer(state.states, state.first + values)
        add_ngrams(w, self._shape, of_ngrams, batch.states, batch.count, s)

    def _take_over(self, index: int, layer: GpuLayer, s: GpuWorkspace, count: Tensor) -> None:
        """Prepares the feed-forward, if any, of a layer without a mixer. If the previous layer had no feed-forward, the
        next norm adds the mixer output that it left in s.output, as if both were one layer. Otherwise s.output becomes
        0."""
        before = self._layers[index - 1].ffn if index else None
        if index and before is None:
            return
        if before is not None:
            any_norm = before.norm if layer.ffn is None else layer.ffn.norm
            assert any_norm is not None
            self._add_and_norm(index, s, any_norm, count)  # only to complete x
        s.output.zero_()

    def _add_and_norm(self, index: int, s: GpuWorkspace, weight: GpuInput, count: Tensor) -> None:
        """Launches x += the previous layer's pending output, then y = norm(x), y = x, or y = a block's reading of
        several streams."""
        y, exact = s.y, self._ffn.inputs.exact(index, s)
        if isinstance(weight, GpuStreams) and (index == 0 or self._layers[index].ngrams is not None):
            self._ffn.inputs.read_streams(weight, None, s, count, y, exact)
        elif not isinstance(weight, GpuStreams) and index == 0:
            add_norm(
                s.x, None, None, None, None, None, count, norm_weight(weight), self._shape.rms_eps,
                y.x, y.codes, y.scales, exact, centered=self._shape.centers_norms,
            )  # fmt: skip
        else:
            self._ffn.add_and_norm(index - 1, s, weight, count, y, None, exact)

    def show(self, index: int, s: GpuWorkspace, observer: LayerObserver) -> None:
        """Shows a layer to the observer. Sums are computed on the CPU, because all GPU memory is planned. index: of
        the layer, from 0."""
        parts, weights, ids, pool_sum = self._ffn.outputs.pending_ffn(index, s)
        output = torch.zeros(s.rows, self._shape.hidden_size) if pool_sum is None else pool_sum.cpu()
        if parts is not None:
            each = parts.cpu().float()  # under the interpreter no copy: not to be changed in place
            if weights is not None:
                each = each * weights.cpu()[:, :, None]
            if ids is not None:
                each = each.masked_fill(ids.cpu()[:, :, None] < 0, 0.0)
            output = output + each.sum(dim=1)
        output = self._ffn.outputs.after_norms(index, s, output)
        after_attention, has_ffn = s.x, self._layers[index].ffn is not None
        if self._ffn.inputs.leaves_attended(index, s) or not has_ffn:
            after_attention = s.x.cpu() + s.output.view(s.rows, -1).cpu().float()
        if (around := self._ffn.outputs.around_own_input(index, s, output)) is not None:
            after_attention, output = around
        observer.layer(
            self._first_layer + index,  # the observer has seen the CPU's layers
            after_attention=after_attention,
            expert_input=s.router_input,
            routing=self._ffn.outputs.routing(index, s),
            expert_output=output if has_ffn else torch.zeros_like(output),
        )

    def _adapters_of(self, index: int, batch: GpuBatch, s: GpuWorkspace) -> LayerAdapters | None:
        if self._adapters is None or batch.adapters is None:
            return None
        return LayerAdapters(self._first_layer + index, self._adapters, batch.adapters, batch.count, s)

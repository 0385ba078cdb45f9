"""The layers on the CPU pool: launches of a layer's products, its token mixer and its feed-forward."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import AdapterRows, KvLayer, StateLayer
from moeserve.models.attention import AttentionShape
from moeserve.models.blocks.cpu.attention import attend, project_qkv
from moeserve.models.blocks.cpu.compressed import (
    CompressedPlans,
    attend_compressed,
    commit_compressed,
    project_compressed,
)
from moeserve.models.blocks.cpu.disk_experts import CpuDiskExperts
from moeserve.models.blocks.cpu.ffn import feed_forward, mix
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.latent import attend_latent, project_latent
from moeserve.models.blocks.cpu.layer_inputs import add_input
from moeserve.models.blocks.cpu.lora import CpuAdapters, LayerAdapters
from moeserve.models.blocks.cpu.mamba2 import multiply_mamba2, recur_mamba2
from moeserve.models.blocks.cpu.ngrams import add_ngrams
from moeserve.models.blocks.cpu.recurrent import mix_recurrent, project_recurrent
from moeserve.models.blocks.cpu.residual import add_block, block_output
from moeserve.models.blocks.cpu.sandwich import mix_parts
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.cpu_step_buffers import draft_records, ngram_records
from moeserve.models.feed_forward import DenseFfnShape, MoeShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.loading.cpu_weights import CpuAttention, CpuDenseFfn, CpuLatentAttention, CpuWeights


class CpuLayers:
    """The layers of a decoder. They use the decoder's buffers, and own two kinds of data about a step: the experts'
    counts, and the state changes of its drafts."""

    def __init__(
        self,
        shape: ModelShape,
        weights: CpuWeights,
        stream: CpuStream,
        kv: Sequence[KvLayer],
        states: Sequence[StateLayer],
        space: CpuWorkspace,
        forms: Mapping[AttentionForm, CpuForm],
        adapters: CpuAdapters | None,
        disk: CpuDiskExperts | None,
        most_drafts: int,
    ) -> None:
        """Arguments: see `CpuDecoder`. space, forms: the decoder's buffers."""
        self._shape = shape
        # Followed by the layer of the next-token block, like `kv`.
        self._shapes = shape.loaded_layers
        self.weights = (
            weights.layers if weights.next_token is None else [*weights.layers, weights.next_token.layer]
        )
        self._ngrams = weights.ngrams
        self._stream = stream
        self._kv = kv
        self._states = states
        self._space = space
        self._forms = self._by_layer(forms)
        self._adapters = adapters
        self._disk = disk
        # Per recurrent layer, the state changes of the step's drafts; RAM pages are allocated at first use.
        records = draft_records(shape, most_drafts) if most_drafts else {}
        self._pending = {
            index: torch.empty(buffer.shape) for index, buffer in records.items() if index < len(self.weights)
        }
        of_ngrams = ngram_records(shape, most_drafts) if most_drafts else None
        self._pending_ngrams = None if of_ngrams is None else torch.empty(of_ngrams.shape)
        # int64 [layers, 2, experts]: tokens routed to each expert, and steps that read its weights, since start-up.
        self.expert_counts = torch.zeros(len(self.weights), 2, shape.num_experts, dtype=torch.int64)
        self.compressed = CompressedPlans.for_model(shape, kv)
        # The step's token ids, by which experts may be chosen.
        self.token_ids = torch.zeros(0, dtype=torch.int32)

    def on(self, space: CpuWorkspace, forms: Mapping[AttentionForm, CpuForm]) -> CpuLayers:
        """Returns the same layers with other step buffers; both count the experts' tokens in one array."""
        layers = copy.copy(self)
        layers._space, layers._forms = space, self._by_layer(forms)
        return layers

    def _by_layer(self, forms: Mapping[AttentionForm, CpuForm]) -> dict[int, CpuForm]:
        """Returns the form of each attention layer that has one in `forms`, looked up once: a look-up makes and hashes
        an `AttentionForm`, and each step would need two of them for each layer."""
        attention = {index: layer.attention for index, layer in enumerate(self._shapes)}
        of_layers = {index: a.form for index, a in attention.items() if a is not None}
        return {index: forms[form] for index, form in of_layers.items() if form in forms}

    def forward(self, index: int, batch: CpuBatch) -> None:
        """Launches one layer on the contents of x. index: of the layer, from 0."""
        self.project(index, batch.n, batch.adapters)
        self.mix_tokens(index, batch)
        self.feed_forward(index, batch)

    def project(self, index: int, n: int, adapters: AdapterRows | None) -> None:
        """Launches the layer's products of norm(x), before tokens interact. n: rows of the step; index: of the layer,
        from 0."""
        stream, space = self._stream, self._space
        w, mixer, eps = self.weights[index].mixer, self._shapes[index].mixer, self._shape.rms_eps
        if isinstance(mixer, AttentionShape):
            assert isinstance(w, CpuAttention)
            of_layer = self._adapters_of(index, adapters)
            project_qkv(stream, w, mixer, self._forms[index], eps, n, space, of_layer)
        elif isinstance(mixer, LatentAttentionShape):
            assert isinstance(w, CpuLatentAttention)
            project_latent(stream, w, mixer, eps, n, space)
        elif isinstance(mixer, CompressedAttentionShape):
            project_compressed(stream, w, mixer, eps, n, space)
        elif mixer is not None and w is not None:
            project_recurrent(stream, mixer, w, eps, n, space)
        if (beside := self.weights[index].beside) is not None:
            multiply_mamba2(stream, beside, n, space)

    def mix_tokens(self, index: int, batch: CpuBatch) -> None:
        """Launches the token mixer after `project`. index: of the layer, from 0."""
        stream, space = self._stream, self._space
        w, mixer, eps = self.weights[index].mixer, self._shapes[index].mixer, self._shape.rms_eps
        if isinstance(mixer, AttentionShape):
            assert isinstance(w, CpuAttention)
            adapters = self._adapters_of(index, batch.adapters)
            kv = self._kv[index if mixer.kv_from is None else mixer.kv_from]
            attend(stream, w, mixer, self._forms[index], eps, kv, batch, space, adapters)
        elif isinstance(mixer, LatentAttentionShape):
            assert isinstance(w, CpuLatentAttention)
            attend_latent(stream, w, mixer, self._forms[index], self._kv[index], batch, space)
        elif isinstance(mixer, CompressedAttentionShape):
            attend_compressed(
                *(stream, w, mixer, self._forms[index], self.compressed, eps, self._kv[index]),
                *(self._states[index], batch, space, self._pending.get(index)),
            )
        elif mixer is not None and w is not None:
            state, pending = self._states[index], self._pending.get(index)
            mix_recurrent(stream, mixer, w, eps, state, batch, space, pending)
        beside, shape = self.weights[index].beside, self._shapes[index].beside
        if beside is not None and shape is not None:
            recur_mamba2(stream, beside, shape, self._states[index], batch, space, self._pending.get(index))

    def _adapters_of(self, index: int, rows: AdapterRows | None) -> LayerAdapters | None:
        return None if self._adapters is None else self._adapters.layer(index, rows)

    def feed_forward(self, index: int, batch: CpuBatch) -> None:
        """Launches the layer's feed-forward and adds its output to x. index: of the layer, from 0."""
        w, eps, space, n = self.weights[index], self._shape.rms_eps, self._space, batch.n
        if w.ffn_output_norm is None:
            out, add = block_output(space)
            self._run_ffn(index, batch, out, add=add)
            add_block(self._stream, n, space)
            return
        assert space.sandwich is not None
        out = self._run_ffn(index, batch, space.sandwich.block, add=False)
        factor = w.factor if w.input is None else 1.0
        self._stream.add_norm(out, w.ffn_output_norm, space.sandwich.eps, n, space.x, factor=factor)
        if w.input is not None:
            add_input(self._stream, w.input, eps, w.factor, index, n, space)

    def _run_ffn(self, index: int, batch: CpuBatch, out: Tensor, *, add: bool) -> Tensor:
        """Launches the feed-forward. Returns the tensor with the result: `out`, to which the result was added or which
        it overwrote, or another tensor."""
        n, adapters, counts = (
            batch.n,
            self._adapters_of(index, batch.adapters),
            self.expert_counts[index],
        )
        w, shape, eps = self.weights[index].ffn, self._shapes[index].ffn, self._shape.rms_eps
        if w is None:
            return out
        if isinstance(w, CpuDenseFfn):
            assert isinstance(shape, DenseFfnShape)
            feed_forward(self._stream, w, shape, eps, n, self._space, adapters, out, add=add)
            return out
        assert isinstance(shape, MoeShape)
        if w.parts is not None:
            parts = w, w.parts, shape, eps, n, self._space, counts, adapters
            return mix_parts(self._stream, *parts, self._disk, index)
        mix(
            *(self._stream, w, shape, eps, n, self._space, counts, adapters, out),
            add=add,
            token_ids=self.token_ids,
            disk=self._disk,
            index=index,
        )
        return out

    def add_ngrams(self, index: int, batch: CpuBatch) -> None:
        """Launches the addition of n-gram embeddings to x. index: of the layer, from 0."""
        w = self._ngrams
        assert w is not None
        state, pending = self._ngram_state(index), self._pending_ngrams
        add_ngrams(self._stream, w, self._shape, state, batch, self._space, pending)

    def _ngram_state(self, index: int) -> StateLayer:
        """Returns the state of the layer's n-gram convolution, which follows the recurrence's state."""
        state, recurrence = self._states[index], self._shapes[index].recurrence
        return StateLayer(
            state.states, state.first + (0 if recurrence is None else recurrence.heads.state_values)
        )

    def commit_states(self, slot: Tensor, first: Tensor, accepted: Tensor) -> None:
        """Launches the commit of accepted drafts to recurrent states, after a step with drafts. slot, first, accepted:
        int32 [sequences]: see `CpuStream.commit_states`."""
        for index, pending in self._pending.items():
            mixer, state = self._shapes[index].mixer, self._states[index]
            if isinstance(mixer, CompressedAttentionShape):
                w = self.weights[index].mixer
                commit_compressed(self._stream, w, mixer, state, slot, first, accepted, pending)
            elif (recurrence := self._shapes[index].recurrence) is not None:
                self._stream.commit_states(recurrence.heads, state, slot, first, accepted, pending)
        ngrams = self._shape.ngrams
        if ngrams is not None and self._pending_ngrams is not None:
            state, kept = self._ngram_state(ngrams.layer), ngrams.kept_inputs
            self._stream.commit_ngrams(state, kept, slot, first, accepted, self._pending_ngrams)

"""A decoder on the CPU pool.

    x = embed(tokens)
    for each layer:
        x = x + attention(norm(x))          attention.py, latent.py, compressed.py, or a recurrence: recurrent.py
        x = x + experts(norm(x))            ffn.py; in a parallel layer of the same norm(x) as attention
    logits = output(output_norm(x))

All operations are launched on the stream; call `CpuStream.wait` before reading a result. A decoder with only the
first layers' weights has x as its result and no logits; a GPU continues from there
(`worker/engines/gpu/cpu_stage.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import AdapterRows, KvLayer, StateLayer
from moeserve.models.blocks.cpu.attention import attend, project_qkv
from moeserve.models.blocks.cpu.compressed import (
    CompressedPlans,
    attend_compressed,
    commit_compressed,
    project_compressed,
)
from moeserve.models.blocks.cpu.disk_experts import CpuDiskExperts
from moeserve.models.blocks.cpu.ffn import feed_forward, mix
from moeserve.models.blocks.cpu.forms import RopeTables, angles_of, forms_of
from moeserve.models.blocks.cpu.latent import attend_latent, project_latent
from moeserve.models.blocks.cpu.layer_inputs import add_input, make_inputs
from moeserve.models.blocks.cpu.lora import CpuAdapters, LayerAdapters
from moeserve.models.blocks.cpu.next_token import CpuNextTokenBlock
from moeserve.models.blocks.cpu.ngrams import add_ngrams, look_up
from moeserve.models.blocks.cpu.recurrent import mix_recurrent, project_recurrent
from moeserve.models.blocks.cpu.residual import add_block, block_output, embed, read_for_head
from moeserve.models.blocks.cpu.sandwich import mix_parts
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.blocks.forget import forget_kv
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.cpu_step_buffers import CPU_LOGIT_ROWS, draft_records, ngram_records
from moeserve.models.interface import AttentionShape, DenseFfnShape, ModelShape, MoeShape
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.loading.cpu_weights import CpuAttention, CpuDenseFfn, CpuLatentAttention, CpuWeights
from moeserve.models.observer import LayerObserver, LayerRouting
from moeserve.models.recurrence import Recurrence

Int32s = npt.NDArray[np.int32]


class CpuDecoder:
    """The model or its first layers. Owns the step buffers and `expert_token_counts`."""

    def __init__(
        self,
        shape: ModelShape,
        weights: CpuWeights,
        stream: CpuStream,
        kv: Sequence[KvLayer],
        max_tokens: int,
        max_model_len: int,
        *,
        states: Sequence[StateLayer] = (),
        most_drafts: int = 0,
        pinned: bool = False,
        adapters: CpuAdapters | None = None,
        angles: Mapping[AttentionForm, RopeTables] | None = None,
        disk: CpuDiskExperts | None = None,
    ) -> None:
        """kv, states: one per layer of the weights; kv of the next-token block comes last; states is empty without
        recurrent layers. most_drafts: drafts per step, at most. pinned: x is in pinned memory, for a GPU to read.
        adapters: LoRA adapters that rows may use. angles: result of `angles_of`, if already computed.
        disk: reads the experts that RAM has no slot for; None: all are in RAM."""
        self.shape = shape
        self._weights = weights
        # Followed by the layer of the next-token block, like `kv`.
        self._shapes = shape.loaded_layers
        self._layers = (
            weights.layers if weights.next_token is None else [*weights.layers, weights.next_token.layer]
        )
        self._stream = stream
        self._kv = kv
        self._adapters = adapters
        self._states = states
        # Per recurrent layer, the state changes of the step's drafts; RAM pages are allocated at first use.
        records = draft_records(shape, most_drafts) if most_drafts else {}
        self._pending = {index: torch.empty(buffer.shape) for index, buffer in records.items()}
        of_ngrams = ngram_records(shape, most_drafts) if most_drafts else None
        self._pending_ngrams = None if of_ngrams is None else torch.empty(of_ngrams.shape)
        # int64 [layers, 2, experts]: tokens routed to each expert, and steps that read its weights, since start-up.
        self._expert_counts = torch.zeros(len(self._layers), 2, shape.num_experts, dtype=torch.int64)
        self.expert_token_counts = self._expert_counts[: len(weights.layers)]
        logit_rows = 0 if weights.head is None else CPU_LOGIT_ROWS
        self._space = CpuWorkspace(
            shape, weights, max_tokens, logit_rows, pinned=pinned, has_adapters=adapters is not None
        )
        self.disk = disk
        self._num_forwards = self._num_heads_read = 0
        self._embedded: Sequence[tuple[int, Tensor]] = ()  # arguments of the last `begin`
        self._token_ids = torch.zeros(0, dtype=torch.int32)
        angles = angles_of(shape, max_model_len, weights.rope_factors) if angles is None else angles
        self._forms = forms_of(shape, self._space, angles)
        self._compressed = CompressedPlans.for_model(shape)
        self.next_token: CpuNextTokenBlock | None = None  # the next-token block, if the model has one
        if weights.next_token is not None:
            assert weights.head is not None
            attention = self._shapes[-1].attention
            assert attention is not None
            self.next_token = CpuNextTokenBlock(
                *(shape, weights, stream, kv[-1], self._space, self._forms[attention.form]),
                self._forward_layer,
            )

    def plan_attention(
        self,
        rows: Int32s,
        counts: Int32s,
        positions: Int32s,
        req_slots: Int32s,
        slot_table: Int32s,
        window_table: Int32s | None = None,
        ends: Int32s | None = None,
    ) -> None:
        """Plans the attention of the next `forward`, without launching it; arguments as for `build_attention_plan`.
        window_table and ends apply to sliding-window layers only; None: slot_table, and causal attention."""
        threads = self._stream.threads
        columns = (rows, counts, positions, req_slots)
        if self._compressed is not None:
            self._compressed.build(*columns, slot_table, threads)
            return
        for form in self._forms.values():
            for rule, plan in form.plans.items():
                build_attention_plan(plan, *columns, slot_table, form.heads, threads, rule=rule)
            if window_table is not None or ends is not None:
                table = slot_table if window_table is None else window_table
                build_attention_plan(form.window_plan, *columns, table, form.heads, threads, ends)

    @property
    def x(self) -> Tensor:
        """float32 [max_tokens, hidden]: the residual stream after the last layer of `forward`, valid until the next
        step."""
        return self._space.x

    def begin(
        self,
        token_ids: Tensor,
        adapters: AdapterRows | None = None,
        embedded: Sequence[tuple[int, Tensor]] = (),
        previous: Int32s | None = None,
    ) -> None:
        """Launches the part of a step that needs only token ids (int32 [n], n up to max_tokens) and adapters, so
        that the pool works while the host prepares `forward`, which must follow. embedded: (first row, float32 [any,
        `ModelShape.embedding_size`]) for rows with embeddings instead of tokens. previous: the tokens before each row,
        as `NgramHashes.rows` takes them, for a model with n-gram embeddings."""
        self._num_forwards += 1
        self._token_ids = token_ids
        n = len(token_ids)
        scale = self.shape.embedding_scale
        embed(self._stream, self._weights.embedding, token_ids, n, self._space, scale=scale)
        self._embedded = embedded
        if embedded:
            self._stream.wait()
            for first, rows in embedded:
                streams = self.shape.residual_width // self.shape.hidden_size
                self._space.x[first : first + len(rows)] = rows[:, : self.shape.hidden_size].repeat(
                    1, streams
                )
        if self._weights.layer_inputs is not None:
            make_inputs(self._stream, self._weights.layer_inputs, self.shape, token_ids, n, self._space)
        ngrams = self.shape.ngrams
        self._is_projected = len(self._weights.layers) > 0 and (ngrams is None or ngrams.layer > 0)
        if self._is_projected:
            self._project(0, n, adapters)
        if self._weights.ngrams is not None and ngrams is not None:
            assert previous is not None
            look_up(self._stream, self._weights.ngrams, ngrams, token_ids.numpy(), previous, self._space)

    def forward(self, batch: CpuBatch, observer: LayerObserver | None = None) -> None:
        """Launches all layers for the rows of `begin`; then x is ready for `logits`. With an observer, waits after
        every layer."""
        if observer is not None:
            self._stream.wait()
            observer.embedding(self._space.x)
        for index in range(len(self._weights.layers)):
            if self.shape.ngrams is not None and index == self.shape.ngrams.layer:
                self._add_ngrams(index, batch)
            if index or not self._is_projected:
                self._project(index, batch.n, batch.adapters)
            self._mix_tokens(index, batch)
            if observer is None:
                self._feed_forward(index, batch)
            else:
                self._show_feed_forward(index, batch, observer)
            if index < self.shape.deep_layers and self._embedded:
                self._add_deep(index)

    def _add_ngrams(self, index: int, batch: CpuBatch) -> None:
        """Launches the addition of n-gram embeddings to x."""
        w = self._weights.ngrams
        assert w is not None
        state, pending = self._ngram_state(index), self._pending_ngrams
        add_ngrams(self._stream, w, self.shape, state, batch, self._space, pending)

    def _ngram_state(self, index: int) -> StateLayer:
        """Returns the state of the layer's n-gram convolution, which lies behind that of its recurrence."""
        state, recurrence = self._states[index], self._shapes[index].recurrence
        return StateLayer(
            state.states, state.first + (0 if recurrence is None else recurrence.heads.state_values)
        )

    def _add_deep(self, index: int) -> None:
        """Waits, then adds DeepStack's embeddings for this layer's output to the rows whose input is embeddings."""
        hidden = self.shape.hidden_size
        self._stream.wait()
        for first, rows in self._embedded:
            self._space.x[first : first + len(rows)] += rows[:, (1 + index) * hidden : (2 + index) * hidden]

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state of each sequence; a batch then needs `states`."""
        return len(self._states) > 0

    def copy_states(self, pairs: Tensor) -> None:
        """Launches copies between slots of recurrent state, before a step: see `CpuStream.copy_states`."""
        if self._states:
            self._stream.copy_states(self._states[0].states, pairs)

    def commit_states(self, slot: Tensor, first: Tensor, accepted: Tensor) -> None:
        """Launches the commit of accepted drafts, after a step with drafts: see `CpuStream.commit_states`."""
        for index, pending in self._pending.items():
            mixer, state = self._shapes[index].mixer, self._states[index]
            if isinstance(mixer, CompressedAttentionShape):
                w = self._layers[index].mixer
                commit_compressed(self._stream, w, mixer, state, slot, first, accepted, pending)
            elif isinstance(mixer, Recurrence):
                self._stream.commit_states(mixer.heads, state, slot, first, accepted, pending)
        ngrams = self.shape.ngrams
        if ngrams is not None and self._pending_ngrams is not None:
            state, kept = self._ngram_state(ngrams.layer), ngrams.kept_inputs
            self._stream.commit_ngrams(state, kept, slot, first, accepted, self._pending_ngrams)

    def logits(self, rows: Tensor) -> Tensor:
        """Launches the head for up to CPU_LOGIT_ROWS rows of the last step. rows: int32 [m]. Returns float32 [m,
        vocab], a view that the next call overwrites; wait before that."""
        space, head, m = self._space, self._weights.head, len(rows)
        assert head is not None
        self._num_heads_read += 1
        read_for_head(self._stream, head.norm, self.shape.rms_eps, rows, space, space.final)
        self._stream.linear(space.final, m, head.output, [space.logits])
        if self.shape.logit_softcap:
            self._stream.softcap(space.logits, m, self.shape.logit_softcap)
        return space.logits[:m]

    def forget(self, kv_slots: list[int], window_slots: list[int] | None = None) -> None:
        """Clears these KV slots and the read counts. window_slots: of windowed layers; None: the same slots. After a
        wait."""
        forget_kv(self.shape, 0, self._kv, kv_slots, window_slots)
        self._expert_counts.zero_()
        self._num_forwards = self._num_heads_read = 0

    def weight_bytes_read(self) -> int:
        """Bytes of weights read by all calls so far; each distinct expert counts once per step."""
        w = self._weights
        reads: Sequence[int] = self._expert_counts[:, 1].sum(dim=1).tolist()
        experts = sum(
            n * layer.moe.experts.bytes_each
            for n, layer in zip(reads, self._layers, strict=True)
            if layer.moe is not None
        )
        heads = 0 if w.head is None else self._num_heads_read * w.head.bytes
        drafting = 0 if self.next_token is None else self.next_token.bytes_read
        return self._num_forwards * w.dense_bytes + heads + int(experts) + drafting

    def read_experts(self) -> tuple[float, int]:
        """Reads all routed experts' weights (of a dense model, its feed-forwards) once without computing. Returns
        seconds and bytes."""
        experts = [layer.moe.experts for layer in self._weights.layers if layer.moe is not None]
        if not experts:
            unrouted = [layer.unrouted for layer in self._weights.layers]
            experts = [each.experts for each in unrouted if each is not None]
        start = time.perf_counter()
        for each in experts:
            for matrix in each.matrices:
                self._stream.read(matrix)
        self._stream.wait()
        return time.perf_counter() - start, sum(e.bytes_each * e.gate.experts for e in experts)

    def _forward_layer(self, index: int, batch: CpuBatch) -> None:
        """Launches one layer on the contents of x."""
        self._project(index, batch.n, batch.adapters)
        self._mix_tokens(index, batch)
        self._feed_forward(index, batch)

    def _project(self, index: int, n: int, adapters: AdapterRows | None) -> None:
        """Launches the layer's products of norm(x), before tokens interact."""
        stream, space = self._stream, self._space
        w, mixer, eps = self._layers[index].mixer, self._shapes[index].mixer, self.shape.rms_eps
        if isinstance(mixer, AttentionShape):
            assert isinstance(w, CpuAttention)
            of_layer = self._adapters_of(index, adapters)
            project_qkv(stream, w, mixer, self._forms[mixer.form], eps, n, space, of_layer)
        elif isinstance(mixer, LatentAttentionShape):
            assert isinstance(w, CpuLatentAttention)
            project_latent(stream, w, mixer, eps, n, space)
        elif isinstance(mixer, CompressedAttentionShape):
            project_compressed(stream, w, mixer, eps, n, space)
        elif mixer is not None and w is not None:
            project_recurrent(stream, mixer, w, eps, n, space)

    def _mix_tokens(self, index: int, batch: CpuBatch) -> None:
        """Launches the token mixer after `_project`."""
        stream, space = self._stream, self._space
        w, mixer, eps = self._layers[index].mixer, self._shapes[index].mixer, self.shape.rms_eps
        if isinstance(mixer, AttentionShape):
            assert isinstance(w, CpuAttention)
            adapters = self._adapters_of(index, batch.adapters)
            kv = self._kv[index if mixer.kv_from is None else mixer.kv_from]
            attend(stream, w, mixer, self._forms[mixer.form], eps, kv, batch, space, adapters)
        elif isinstance(mixer, LatentAttentionShape):
            assert isinstance(w, CpuLatentAttention)
            attend_latent(stream, w, mixer, self._forms[mixer.form], self._kv[index], batch, space)
        elif isinstance(mixer, CompressedAttentionShape):
            attend_compressed(
                *(stream, w, mixer, self._forms[mixer.form], self._compressed, eps, self._kv[index]),
                *(self._states[index], batch, space, self._pending.get(index)),
            )
        elif mixer is not None and w is not None:
            state, pending = self._states[index], self._pending.get(index)
            mix_recurrent(stream, mixer, w, eps, state, batch, space, pending)

    def _adapters_of(self, index: int, rows: AdapterRows | None) -> LayerAdapters | None:
        return None if self._adapters is None else self._adapters.layer(index, rows)

    def _feed_forward(self, index: int, batch: CpuBatch) -> None:
        w, eps, space, n = self._layers[index], self.shape.rms_eps, self._space, batch.n
        if w.ffn_output_norm is None:
            out, add = block_output(space)
            self._run_ffn(index, batch, out, add=add)
            add_block(self._stream, n, space)
            return
        assert space.sandwich is not None
        out = self._run_ffn(index, batch, space.sandwich.block, add=False)
        factor = w.factor if w.input is None else 1.0
        self._stream.add_norm(out, w.ffn_output_norm, eps, n, space.x, factor=factor)
        if w.input is not None:
            add_input(self._stream, w.input, eps, w.factor, index, n, space)

    def _run_ffn(self, index: int, batch: CpuBatch, out: Tensor, *, add: bool) -> Tensor:
        """Launches the feed-forward. Returns the tensor with the result: `out`, added to or overwritten, or another
        one."""
        n, adapters, counts = (
            batch.n,
            self._adapters_of(index, batch.adapters),
            self._expert_counts[index],
        )
        w, shape, eps = self._layers[index].ffn, self._shapes[index].ffn, self.shape.rms_eps
        if w is None:
            return out
        if isinstance(w, CpuDenseFfn):
            assert isinstance(shape, DenseFfnShape)
            feed_forward(self._stream, w, shape, eps, n, self._space, adapters, out, add=add)
            return out
        assert isinstance(shape, MoeShape)
        if w.parts is not None:
            parts = w, w.parts, shape, eps, n, self._space, counts, adapters
            return mix_parts(self._stream, *parts, self.disk, index)
        mix(
            *(self._stream, w, shape, eps, n, self._space, counts, adapters, out),
            add=add,
            token_ids=self._token_ids,
            disk=self.disk,
            index=index,
        )
        return out

    def _show_feed_forward(self, index: int, batch: CpuBatch, observer: LayerObserver) -> None:
        """Computes a layer's feed-forward and waits for it. The kernels add to x directly, so the observer gets the
        difference."""
        n = batch.n
        space, is_dense = self._space, self._shapes[index].moe is None
        self._stream.wait()
        after_attention = space.x[:n].clone()
        self._feed_forward(index, batch)
        self._stream.wait()
        observer.layer(
            index,
            after_attention=after_attention,
            expert_input=space.y.f32,
            routing=None
            if is_dense
            else LayerRouting(space.router_logits, space.routing.ids, space.routing.weights),
            expert_output=space.x[:n] - after_attention if space.streams is None else space.streams.block[:n],
        )

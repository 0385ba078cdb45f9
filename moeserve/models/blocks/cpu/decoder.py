"""A decoder on the CPU pool.

    x = embed(tokens)
    for each layer:                         layers.py
        x = x + attention(norm(x))          attention.py, latent.py, compressed.py, or a recurrence: recurrent.py
        x = x + experts(norm(x))            ffn.py; in a parallel layer of the same norm(x) as attention
    logits = output(output_norm(x))

All operations are launched on the stream; call `CpuStream.wait` before reading a result. A decoder that has only the
first layers' weights computes x and no logits; a GPU computes the other layers (`worker/engines/gpu/cpu_stage.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import Activations, AdapterRows, KvLayer, StateLayer
from moeserve.models.blocks.cpu.disk_experts import CpuDiskExperts
from moeserve.models.blocks.cpu.forms import RopeTables, angles_of, forms_of, next_token_form
from moeserve.models.blocks.cpu.layer_inputs import make_inputs
from moeserve.models.blocks.cpu.layers import CpuLayers
from moeserve.models.blocks.cpu.lora import CpuAdapters
from moeserve.models.blocks.cpu.next_token import CpuNextTokenBlock
from moeserve.models.blocks.cpu.ngrams import look_up
from moeserve.models.blocks.cpu.repeated_steps import MOST_ROWS, RepeatedSteps, plan_kinds
from moeserve.models.blocks.cpu.residual import embed, norm_embeddings, note_input, read_for_head
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.blocks.forget import forget_kv
from moeserve.models.cpu_step_buffers import CPU_LOGIT_ROWS
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.loading.cpu_weights import CpuWeights
from moeserve.models.observer import LayerObserver, LayerRouting

Int32s = npt.NDArray[np.int32]


class CpuDecoder:
    """The model or its first layers. Owns the step buffers."""

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
        taps: Sequence[int] = (),
        repeats_steps: bool = False,
    ) -> None:
        """kv, states: one per layer of the weights. The next-token block's kv comes last; states is empty without
        recurrent layers. most_drafts: maximum number of drafts in a step. pinned: whether x is in pinned memory, so
        that a GPU can read it. adapters: LoRA adapters that rows may use. angles: result of `angles_of`, if already
        computed. disk: reads the experts that have no slot in RAM; None: all experts are in RAM. taps: layers before
        which steps copy the residual; the number of layers stands for after the last one. repeats_steps: whether small
        steps repeat the operations of earlier ones; the caller must then wait for every step before it begins the
        next."""
        self.shape = shape
        self._weights = weights
        self._stream = stream
        self._kv = kv
        self._states = states
        self._rings = [rings for layer in kv if (rings := layer.of_states) is not None]
        logit_rows = 0 if weights.head is None else CPU_LOGIT_ROWS
        self._space = CpuWorkspace(
            shape, weights, max_tokens, logit_rows, pinned=pinned, has_adapters=adapters is not None
        )
        # The residual before these layers in the last step.
        self.taps = {layer: Activations(max_tokens, shape.residual_width, q8=False) for layer in taps}
        self._ones = torch.ones(shape.hidden_size) if shape.norms_embeddings else None
        self.disk = disk
        self._num_forwards = self._num_heads_read = 0
        self._embedded: Sequence[tuple[int, Tensor]] = ()  # arguments of the last `begin`
        # Whether `begin` launches the first layer's products.
        self._projects_first = bool(weights.layers) and (shape.ngrams is None or shape.ngrams.layer > 0)
        angles = angles_of(shape, max_model_len, weights.rope_factors) if angles is None else angles
        self._forms = forms_of(shape, self._space, angles)
        self._layers = CpuLayers(
            *(shape, weights, stream, kv, states, self._space, self._forms, adapters, disk, most_drafts)
        )
        self._repeated: RepeatedSteps | None = None
        if repeats_steps and disk is None:
            vocab = len(weights.embedding.table)
            self._repeated = RepeatedSteps(shape, stream, kv, states, self._forms, vocab)
        self._is_in_place = (
            False  # whether the last `begin` put its token ids where recorded operations read them
        )
        self.next_token: CpuNextTokenBlock | None = None  # the next-token block, if the model has one
        if weights.next_token is not None:
            assert weights.head is not None
            form = next_token_form(shape, self._forms, self._space)
            self.next_token = CpuNextTokenBlock(
                shape, weights, stream, kv[-1], self._space, form, self._layers
            )

    @property
    def expert_token_counts(self) -> Tensor:
        """Returns int64 [layers, 2, experts]: tokens routed to each expert, and steps that read its weights, since
        start-up."""
        return self._layers.expert_counts[: len(self._weights.layers)]

    def plan_attention(
        self,
        rows: Int32s,
        counts: Int32s,
        positions: Int32s,
        req_slots: Int32s,
        slot_table: Int32s,
        window_table: Int32s | None = None,
        ends: Int32s | None = None,
        state_slots: Int32s | None = None,
    ) -> None:
        """Plans the attention of the next `forward`, without launching it; arguments as for `build_attention_plan`.
        window_table applies to sliding-window layers only; None: these layers use slot_table. ends applies to them, and
        to the others where `full_layers_see_ahead`; None: attention is causal. state_slots: int32, the sequences' state
        slots; None: there are no states."""
        threads = self._stream.threads
        columns = (rows, counts, positions, req_slots)
        if self._layers.compressed is not None:
            assert state_slots is not None
            self._layers.compressed.build(*columns, state_slots, slot_table, threads)
            return
        full_ends = ends if self.shape.full_layers_see_ahead else None
        for form in self._forms.values():
            for rule, plan in form.plans.items():
                build_attention_plan(plan, *columns, slot_table, form.heads, threads, full_ends, rule=rule)
            if window_table is not None or ends is not None:
                table = slot_table if window_table is None else window_table
                build_attention_plan(form.window_plan, *columns, table, form.heads, threads, ends)

    @property
    def x(self) -> Tensor:
        """Returns float32 [max_tokens, hidden]: the residual stream after the last layer of `forward`, valid until the
        next step."""
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
        self._embedded = embedded
        n = len(token_ids)
        self._is_in_place = False
        if self._repeated is not None and n <= MOST_ROWS and adapters is None and not embedded:
            self._layers.token_ids = token_ids = self._repeated.tokens(token_ids)
            self._repeated.launch(n, partial(self._launch_first, token_ids, None))
            self._is_in_place = True
        else:
            self._layers.token_ids = token_ids
            self._launch_first(token_ids, adapters)
        if self._weights.ngrams is not None and self.shape.ngrams is not None:
            assert previous is not None
            ids = token_ids.numpy()
            look_up(self._stream, self._weights.ngrams, self.shape.ngrams, ids, previous, self._space)

    def _launch_first(self, token_ids: Tensor, adapters: AdapterRows | None) -> None:
        """Launches the embeddings, and the first layer's products."""
        n = len(token_ids)
        scale = self.shape.embedding_scale
        embed(self._stream, self._weights.embedding, token_ids, n, self._space, scale=scale)
        if self._ones is not None:
            norm_embeddings(self._stream, self._ones, self.shape.rms_eps, n, self._space)
        if self._embedded:
            self._stream.wait()
            for first, rows in self._embedded:
                streams = self.shape.residual_width // self.shape.hidden_size
                self._space.x[first : first + len(rows)] = rows[:, : self.shape.hidden_size].repeat(
                    1, streams
                )
        if self._weights.layer_inputs is not None:
            make_inputs(self._stream, self._weights.layer_inputs, self.shape, token_ids, n, self._space)
        if self._projects_first:
            self._layers.project(0, n, adapters)

    def forward(self, batch: CpuBatch, observer: LayerObserver | None = None) -> None:
        """Launches all layers for the rows of `begin`; then x is ready for `logits`. With an observer, waits after
        every layer."""
        if observer is not None:
            self._stream.wait()
            observer.embedding(self._space.x)
        elif self._repeated is not None and self._is_in_place and self._repeated.takes(batch):
            batch = self._repeated.batch(batch)
            kinds = plan_kinds(self._forms, self._layers.compressed)
            key = batch.n, batch.has_window_plan, batch.window_slots is not None, kinds
            self._repeated.launch(key, partial(self._launch_layers, batch, None))
            return
        self._launch_layers(batch, observer)

    def _launch_layers(self, batch: CpuBatch, observer: LayerObserver | None) -> None:
        if self._projects_first:
            note_input(self._layers.weights[0].mixer, self._space)
        for index in range(len(self._weights.layers)):
            self._tap(index, batch.n)
            if self.shape.ngrams is not None and index == self.shape.ngrams.layer:
                self._layers.add_ngrams(index, batch)
            if index or not self._projects_first:
                self._layers.project(index, batch.n, batch.adapters)
            self._layers.mix_tokens(index, batch)
            if observer is None:
                self._layers.feed_forward(index, batch)
            else:
                self._show_feed_forward(index, batch, observer)
            if index < self.shape.deep_layers and self._embedded:
                self._add_deep(index)
        self._tap(len(self._weights.layers), batch.n)

    def _tap(self, index: int, n: int) -> None:
        """Launches the copy of the residual before this layer, if it is to be read."""
        if index in self.taps:
            self._stream.gelu_gate(None, self._space.x, 0, n, self.taps[index])  # without a gate a copy

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
        """Launches copies between slots of recurrent state, before a step. pairs: int32 [n, 2] (source, target): see
        `CpuStream.copy_states`."""
        if self._states and self._states[0].states.shape[1]:  # states that are only windows have no values
            self._stream.copy_states(self._states[0].states, pairs)
        # A ring of keys need not be zeroed, because only written keys are read.
        copies = pairs[pairs[:, 0] >= 0]
        for rings in self._rings if len(copies) else ():
            self._stream.copy_states(rings, copies)

    def commit_states(self, slot: Tensor, first: Tensor, accepted: Tensor) -> None:
        """Launches the commit of accepted drafts to recurrent states, after a step with drafts. slot, first, accepted:
        int32 [sequences]: see `CpuStream.commit_states`."""
        self._layers.commit_states(slot, first, accepted)

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
        """Clears these KV slots and the read counts. window_slots: slots of windowed layers; None: the same slots. Call
        it after a wait."""
        forget_kv(self.shape, 0, self._kv, kv_slots, window_slots)
        self._layers.expert_counts.zero_()
        self._num_forwards = self._num_heads_read = 0

    def weight_bytes_read(self) -> int:
        """Bytes of weights read by all calls so far; each distinct expert counts once per step."""
        w = self._weights
        reads: Sequence[int] = self._layers.expert_counts[:, 1].sum(dim=1).tolist()
        experts = sum(
            n * layer.moe.experts.bytes_each
            for n, layer in zip(reads, self._layers.weights, strict=True)
            if layer.moe is not None
        )
        heads = 0 if w.head is None else self._num_heads_read * w.head.bytes
        drafting = 0 if self.next_token is None else self.next_token.bytes_read
        return self._num_forwards * w.dense_bytes + heads + int(experts) + drafting

    def read_experts(self) -> tuple[float, int]:
        """Reads the weights of all routed experts (in a dense model, of all feed-forwards) once without computing, to
        measure the memory's speed. Returns the seconds and the bytes."""
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

    def _show_feed_forward(self, index: int, batch: CpuBatch, observer: LayerObserver) -> None:
        """Computes a layer's feed-forward and waits for it. The kernels add to x directly, so the observer gets the
        difference."""
        n = batch.n
        space, is_dense = self._space, self.shape.layers[index].moe is None
        self._stream.wait()
        after_attention = space.x[:n].clone()
        self._layers.feed_forward(index, batch)
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

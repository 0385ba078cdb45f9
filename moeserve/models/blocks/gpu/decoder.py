"""A decoder on a GPU: the same network as `blocks/cpu`, as launches on the current stream.

    x = embed(tokens)
    for each layer:                         layers.py
        x = x + attention(norm(x))          attention.py, latent.py, compressed.py, or a recurrence: recurrent.py
        x = x + experts(norm(x))            ffn.py; in a parallel layer of the same norm(x) as attention
    logits = output(output_norm(x))

Sandwiched layers normalise a block's output before they add it (kernels/norm/sandwich.py).
Some experts may be in RAM: the CPU pool computes them while the GPU computes its own (`moeserve.kernels.handoff`).
The first layers may be in RAM as a whole: the weights here are then the last layers', numbered from 0, and x comes
from the CPU. With pipeline stages, other GPUs have the layers before and after these (`stage.py`).

The next norm adds a block's output to x, in the same launch. A residual of several streams is read and written through
learned weights instead (residual.py). Nothing here waits for the GPU, reads from it or
allocates on it, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.embed.op import KvPlaces, embed
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.launch import is_compiling_ahead
from moeserve.kernels.linear.softcap import softcap
from moeserve.kernels.norm.op import add_norm, norm_in_place
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.models.blocks.forget import forget_kv
from moeserve.models.blocks.gpu.draft_head import PlacedDraftHead
from moeserve.models.blocks.gpu.drafting_block import BlockSizes, GpuDraftingBlock
from moeserve.models.blocks.gpu.drafting_layers import drafting_block
from moeserve.models.blocks.gpu.ffn import GpuFfnBlock
from moeserve.models.blocks.gpu.first_rows import as_planes, numbers, upload
from moeserve.models.blocks.gpu.forced_routing import ForcedRouting
from moeserve.models.blocks.gpu.forms import forms_of
from moeserve.models.blocks.gpu.head_product import GpuHead, head_product
from moeserve.models.blocks.gpu.layer_inputs import make_inputs
from moeserve.models.blocks.gpu.layer_kinds import distinct_layers
from moeserve.models.blocks.gpu.layers import GpuLayers
from moeserve.models.blocks.gpu.linear import NO_WORKSPACE, multiply
from moeserve.models.blocks.gpu.lora import GpuAdapters
from moeserve.models.blocks.gpu.ngrams import Int32s, look_up
from moeserve.models.blocks.gpu.residual import read_streams
from moeserve.models.blocks.gpu.stage import WHOLE, Stage, StepPart
from moeserve.models.blocks.gpu.state_drafts import GpuStateDrafts, recurrent_layers
from moeserve.models.blocks.gpu.state_slots import StateSlots
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.workspace import FLOATS, GpuBatch, make_workspaces
from moeserve.models.interface import ModelShape
from moeserve.models.loading.expert_fetch import ExpertFetch
from moeserve.models.loading.expert_stream import ExpertStream
from moeserve.models.loading.gpu_inputs import GpuStreams, input_bytes, norm_weight
from moeserve.models.loading.gpu_weights import GpuWeights, float_type, has_float_weights, plane_tensors
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.models.observer import LayerObserver
from moeserve.models.step_buffers import GPU_LOGIT_ROWS, head_arena_bytes, step_sizes


class GpuDecoder:
    """The model, or its last layers. Owns the step buffers."""

    def __init__(
        self,
        shape: ModelShape,
        weights: GpuWeights,
        kv: Sequence[KvLayer],
        slot_table: Tensor,
        max_tokens: int,
        max_model_len: int,
        handoff: ExpertHandoff | None = None,
        expert_stream: ExpertStream | None = None,
        prefill: Sequence[str] | None = None,
        from_cpu: Tensor | None = None,
        states: Sequence[StateLayer] = (),
        forced_rows: int = 0,
        sums: GpuSums | None = None,
        adapters: GpuAdapters | None = None,
        window_table: Tensor | None = None,
        stage: Stage | None = None,
        num_in_ram: Sequence[int] | None = None,
        max_state_drafts: int = 0,
        slots_ahead: Tensor | None = None,
        max_drafts: int = 0,
        draft_head: PlacedDraftHead | None = None,
    ) -> None:
        """kv, states: one per layer of the weights; states is empty without recurrent layers. slot_table: int32
        [requests, length], the KV slot of each position of a request. handoff, expert_stream, prefill, num_in_ram: see
        `GpuFfnBlock`. from_cpu: float32 [max_tokens, residual_width] in pinned memory; a step reads x from it instead
        of embedding tokens. forced_rows: steps of up to this number of rows take the router's choice from
        `forced_routing`; 0: none. sums: sums over the GPUs of a tensor-parallel group; None: every block is whole on
        this GPU. adapters: LoRA adapters that rows may use. window_table: slot_table of windowed layers; None: they use
        slot_table. stage: this GPU's pipeline stage, if other GPUs have the layers before or after. max_state_drafts:
        maximum number of drafts per step, for models with recurrent layers. draft_head: an EAGLE-3 head, which drafts
        in place of the next-token block; the drafting layer has the last of `kv`. slots_ahead: for a drafting layer, at
        each position of a request the KV slot of the next position. max_drafts: maximum number of drafts of a row."""
        self.shape = shape
        self.device = slot_table.device
        self.adapters = adapters
        self.num_layers = len(weights.layers)
        self._first_layer = shape.num_layers - self.num_layers
        self._weights = weights
        self._ngrams = next((layer.ngrams for layer in weights.layers if layer.ngrams is not None), None)
        self._kv = kv
        self._states = states
        self._state_slots = StateSlots(states, kv)
        # x from the CPU goes through the embedding kernel, row by row, so that every step begins with the same
        # kernel.
        self._first_rows = weights.embedding if from_cpu is None else as_planes(from_cpu, self.device)
        self._row_numbers = None if from_cpu is None else numbers(len(from_cpu), self.device)
        self.stage = stage
        if stage is not None and not stage.is_first:
            self._first_rows, self._row_numbers = as_planes(stage.inbox, self.device), stage.row_numbers
        self._slot_table = slot_table
        self._window_table = window_table
        # x from the CPU or another GPU is already scaled.
        self._embedding_scale = shape.embedding_scale if self._row_numbers is None else 1.0
        self._embedding_streams = shape.num_streams if self._row_numbers is None else 1
        is_normed = shape.norms_embeddings and self._row_numbers is None
        self._ones = torch.ones(shape.hidden_size, device=self.device) if is_normed else None
        forms = forms_of(shape, max_model_len, self.device, weights.rope_factors)
        layer_sums = GpuSums(None, [None] * self.num_layers, None) if sums is None else sums
        self.forced_routing = (
            ForcedRouting(self.num_layers, shape.num_experts, step_sizes(forced_rows)[-1], self.device)
            if forced_rows
            else None
        )
        self._ffn = GpuFfnBlock(
            shape,
            weights.layers,
            self.device,
            handoff,
            expert_stream,
            prefill,
            layer_sums,
            self.forced_routing,
            num_in_ram,
        )
        self._state_drafts: GpuStateDrafts | None = None
        if max_state_drafts and recurrent_layers(shape, len(states)):
            self._state_drafts = GpuStateDrafts(shape, states, max_state_drafts)
        self.sizes = step_sizes(max_tokens)
        floats = float_type(weights, self.device)
        taps = None if draft_head is None else draft_head.taps(shape, self.sizes[-1], self.device)
        self._layers = GpuLayers(
            *(shape, weights.layers, kv, states, slot_table, window_table, forms),
            *(self._ffn, layer_sums, adapters, self._state_drafts, taps),
        )
        has_bfloat16 = any(layer.keys.dtype == torch.bfloat16 for layer in kv)
        queries = torch.bfloat16 if has_bfloat16 else torch.float16
        self._spaces = make_workspaces(
            shape,
            max_tokens,
            floats,
            self.device,
            queries=queries,
            float_weights=has_float_weights(weights),
            adapter_rank=0 if adapters is None else adapters.rank,
            experts_here=weights.most_experts if expert_stream is None else None,
            length=max_model_len,
        )
        self.head_sizes = [size for size in self.sizes if size <= GPU_LOGIT_ROWS]
        logits = torch.empty(self.head_sizes[-1], shape.vocab_size, device=self.device)
        is_whole = all(part is None for part in (handoff, expert_stream, stage, adapters, sums))
        of_layers = [
            (layer, kv[index], states[index : index + 1], shape.layers[self._first_layer + index])
            for index, layer in enumerate(weights.layers)
        ]
        # `compile_ahead` launches only these.
        self._distinct_layers = distinct_layers(of_layers) if is_whole else list(range(self.num_layers))
        head_bytes = head_arena_bytes(shape, self.head_sizes[-1], FLOATS[floats])
        head_arena = torch.empty(head_bytes, dtype=torch.uint8, device=self.device)
        self._heads = {size: GpuHead(shape, logits, size, floats, head_arena) for size in self.head_sizes}
        self._head_products = {
            size: head_product(weights.output, size, floats, self.device) for size in self.head_sizes
        }
        self.next_token: GpuDraftingBlock | None = None  # what drafts: the model's own block, or the head
        if slots_ahead is not None:
            heads = {size: (self._heads[size], self._head_products[size]) for size in self.head_sizes}
            sizes = BlockSizes(slots_ahead, self.sizes[-1], max_drafts, floats, queries)
            self.next_token = drafting_block(shape, weights, kv, forms, heads, sizes, draft_head, taps)

    @property
    def expert_token_counts(self) -> Tensor:
        """Returns int64 [layers, experts] on the device: tokens routed to each expert since start-up."""
        return self._ffn.expert_token_counts

    def pool_reads(self, layers: npt.NDArray[np.bool_]) -> int:
        """Returns how many experts of these layers (bool [layers]) the CPU pool has read since start-up. Call it only
        between steps."""
        return self._ffn.ram.pool_reads(layers)

    def fetch_missed(self, fetch: ExpertFetch | None) -> None:
        """Sets what fetches missed experts within steps; None: nothing does. Call it before graphs are captured."""
        self._ffn.ram.fetch = fetch

    @property
    def num_kv_slots(self) -> int:
        """Number of slots of the smallest KV pool; 0 if all layers are recurrent."""
        return min((layer.num_slots for layer in self._kv if layer.num_slots), default=0)

    @property
    def has_states(self) -> bool:
        """True if some layers are recurrent; a batch then needs `states`."""
        return len(self._states) > 0

    @property
    def can_stream(self) -> bool:
        """True if experts in RAM can be streamed to the GPU."""
        return self._ffn.ram.expert_stream is not None

    def streams(self, batch: GpuBatch) -> bool:
        """Returns whether the step streams experts from RAM to the GPU."""
        return self._ffn.ram.streams(batch)

    def place_embeddings(self, size: int, embedded: Sequence[tuple[int, Tensor]]) -> None:
        """Launches the copies of embeddings into the next step's rows. Call it before `forward`. size: the step's
        padded size. embedded: pairs (first row, float32 [n, `ModelShape.embedding_size`] on the CPU). The token ids
        of these rows must be `EMBEDDED`."""
        s, hidden = self._spaces[size], self.shape.hidden_size
        for first, rows in embedded:
            if self._row_numbers is None:
                in_streams = rows[:, :hidden].repeat(1, self.shape.num_streams)
                upload(in_streams, s.x[first : first + len(rows)])
            if s.deep is not None:
                upload(rows[:, hidden:], s.deep[first : first + len(rows)])

    @property
    def table(self) -> NgramRows | None:
        """The table of the n-gram embeddings that a layer here adds; None if none does."""
        return None if self._ngrams is None else self._ngrams.table

    def place_ngrams(self, size: int, tokens: Int32s, previous: Int32s) -> None:
        """Reads the n-gram embeddings of the next step's rows, and launches their copy. Call it before `forward`,
        only if the model has a `table`. size: the step's padded size. tokens, previous: see `NgramHashes.rows`."""
        space = self._spaces[size].ngrams
        assert self._ngrams is not None
        assert space is not None
        look_up(self._ngrams, tokens, previous, space)

    def clear_ngrams(self, size: int) -> None:
        """Places zeros as n-gram embeddings, for a dummy step, as `place_ngrams` places real ones. Does nothing for a
        model without a `table`."""
        space = self._spaces[size].ngrams
        if space is not None:
            space.embedded.zero_()

    def begin(self, batch: GpuBatch | None = None) -> None:
        """Starts the host's work for the experts in RAM. Call it before each `forward`, and with None before each
        replay of a CUDA graph, which does not include it."""
        self._ffn.ram.begin(batch)

    def check(self) -> None:
        """Checks whether the CPU has computed its part of the step; to be called after each step. Raises HandoffError
        if the CPU failed; the step's results are then invalid."""
        self._ffn.ram.check()

    def forward(self, batch: GpuBatch, observer: LayerObserver | None = None, part: StepPart = WHOLE) -> None:
        """Launches all layers. The input of `logits` stays valid until the next call. With an observer, waits after
        every layer, so no graph can capture the step. part: which rows of a step the batch is; only pipeline stages
        divide steps."""
        s, table = self._spaces[len(batch.token_ids)], self._first_rows
        assert table is not None
        if self.stage is not None:
            self.stage.begin(part, s.rows)
        ids = batch.token_ids
        if self._row_numbers is not None:
            ids = self._row_numbers[part.first_row : part.first_row + s.rows]
        places = KvPlaces(
            *(self._slot_table, batch.req_slots, batch.positions, batch.kv_slots),
            *(self._window_table, batch.window_slots),
        )
        embed(
            ids, batch.count, plane_tensors(table), int(table.type), s.x, places, scale=self._embedding_scale,
            streams=self._embedding_streams,
        )  # fmt: skip
        if self._ones is not None:  # embeddings in the place of tokens are normalised already
            norm_in_place(s.x, self._ones, batch.count, self.shape.rms_eps)
        if (inputs := self._weights.layer_inputs) is not None:
            make_inputs(inputs, self.shape, batch.token_ids, batch.count, s)
        if observer is not None and self._row_numbers is None:
            observer.embedding(s.x)
        for index in self._distinct_layers if is_compiling_ahead() else range(self.num_layers):
            self._layers.forward(index, batch, s)
            if observer is not None:
                self._layers.show(index, s, observer)
        last, norm = self.num_layers - 1, self._weights.output_norm
        if isinstance(norm, GpuStreams):
            self._ffn.complete(last, s, batch.count)
        if self.stage is not None:
            self._ffn.add_and_norm(last, s, norm, batch.count, s.y, None)  # only to complete x
            self.stage.end(part, s.x)

    def begin_keeping(self) -> None:
        """Prepares the capture of `keep_up`, which follows replays of steps."""
        self._ffn.ram.assume_graph()

    def keep_up(self, batch: GpuBatch) -> None:
        """Launches what the block that drafts computes after the last `forward`: `GpuDraftingBlock.take_step`."""
        assert self.next_token is not None
        s = self._spaces[len(batch.token_ids)]
        self.next_token.take_step(batch, partial(self._ffn.add_and_norm, self.num_layers - 1, s))

    @property
    def has_head(self) -> bool:
        """True if `logits` may be called."""
        return self._weights.output is not None

    def logits(self, size: int, rows: Tensor, count: Tensor) -> Tensor:
        """Launches the head for `rows` (int32, padded to one of head_sizes; count[0] are valid) of the last step,
        whose padded size was `size`. Returns float32 [len(rows), vocab], overwritten by the next call."""
        s, head, norm, output = (
            self._spaces[size],
            self._heads[len(rows)],
            self._weights.output_norm,
            self._weights.output,
        )
        assert output is not None
        if isinstance(norm, GpuStreams):
            assert head.streams is not None
            read_streams(
                norm, self.shape.rms_eps, s.x, None, rows, count, head.streams, head.final, None, NO_WORKSPACE
            )
        elif self.stage is None:
            self._ffn.add_and_norm(self.num_layers - 1, s, norm, count, head.final, rows)
        else:
            y, x = head.final, self.stage.inbox
            add_norm(
                x, None, None, None, None, rows, count, norm_weight(norm), self.shape.rms_eps, y.x, y.codes, y.scales,
                centered=self.shape.centers_norms,
            )  # fmt: skip
        by_quads = self._head_products[len(rows)]
        if by_quads is None:
            multiply(output, head.final, count, head.logits)
        else:
            by_quads(output, head.final, count, head.logits)
        if self.shape.logit_softcap:
            softcap(head.logits, self.shape.logit_softcap)
        return head.logits

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Launches copies between slots of recurrent state, before a step, for each (source, target) pair in order;
        source -1 zeroes the target."""
        self._state_slots.copy(pairs)

    def commit_states(self, moved: Tensor, count: int) -> None:
        """Launches the changes of `count` sequences' recurrent states by the accepted drafts of the last step. moved:
        int32, on the GPU; see `commit_drafts`."""
        assert self._state_drafts is not None
        self._state_drafts.commit(moved, count)

    @property
    def has_state_drafts(self) -> bool:
        """True if recurrent layers record drafts; a batch's sequences then need `drafts`."""
        return self._state_drafts is not None

    @property
    def has_window_slots(self) -> bool:
        """True if windowed layers have separate KV slots; a batch then needs `window_slots`."""
        return self._window_table is not None

    def forget(self, kv_slots: list[int], window_slots: list[int] | None = None) -> None:
        """Clears these KV slots and the expert counts. window_slots: of windowed layers; None: the same slots. May be
        called only after a step has ended."""
        forget_kv(self.shape, self._first_layer, self._kv, kv_slots, window_slots)
        self._ffn.forget_counts()

    @property
    def on_gpu(self) -> Tensor:
        """Returns bool [layers, experts], on the CPU: the experts that are in GPU memory."""
        everywhere = torch.ones(self.shape.num_experts, dtype=torch.bool)
        maps = [layer.expert_map for layer in self._weights.layers]
        return torch.stack([everywhere if m is None else (m >= 0).cpu() for m in maps])

    def weight_bytes(self, used: Tensor) -> int:
        """Returns the bytes of GPU weights read by a step that uses these experts: bool [layers, experts], on the
        CPU."""
        w = self._weights
        total = 0 if w.output is None else w.output.nbytes + input_bytes(w.output_norm)
        total += 0 if w.layer_inputs is None else w.layer_inputs.projection.nbytes
        for layer, count in zip(w.layers, (used & self.on_gpu).sum(dim=1).tolist(), strict=True):
            total += layer.dense_bytes
            experts = None if layer.moe is None else layer.moe.experts
            if experts is not None:
                total += experts.nbytes * count // experts.gate.experts
        return total

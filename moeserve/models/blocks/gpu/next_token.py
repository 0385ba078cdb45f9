"""The model's next-token block on a GPU, which drafts: see models/next_token.py.

`take_step` is a part of each step: it computes the keys and values of the step's rows, whose tokens are all known, and
keeps each request's last hidden state. `link` computes one draft of each row of a chain; its token is the row's next
input, so that a chain needs no host. `place_drafts` hands the drafts to the step that verifies them. All launch only,
so a CUDA graph can capture them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.embed.op import KvPlaces, embed
from moeserve.kernels.latent.op import norm_rows
from moeserve.kernels.linear.op import gemv_tokens, weight_of
from moeserve.kernels.linear.panel_gemv import multiply_panels
from moeserve.kernels.linear.softcap import softcap
from moeserve.kernels.next_token.op import (
    BlockPlaces,
    ChainRows,
    Chosen,
    JoinNorms,
    KeptStates,
    ScoredPanels,
    StepStates,
    block_places,
    draft_of,
    join_rows,
    join_step,
    keep_rows,
    keep_step,
    place_drafts,
)
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.gpu.ffn import GpuFfnBlock
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.head_product import GpuHead, HeadProduct
from moeserve.models.blocks.gpu.layers import GpuLayers
from moeserve.models.blocks.gpu.linear import multiply
from moeserve.models.blocks.gpu.sums import GpuSums
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace, make_workspaces
from moeserve.models.head_shortlist import most_panels
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.loading.gpu_weights import GpuWeights, has_float_weights, plane_tensors
from moeserve.models.step_buffers import (
    CHAIN_ROWS,
    NEXT_TOKEN_ROWS,
    SMALL_BATCH_ROWS,
    chain_numbers,
    chain_sections,
    next_token_shape,
    step_sizes,
)

NUMBERS = 9  # of `ChainColumns`, for each row
ALIGN = 4  # int32s: kernels are compiled for aligned addresses


@dataclass(frozen=True, slots=True)
class ChainColumns:
    """Views of a chain's uploaded inputs: int32 [width] each, except planned_slots [depths, width] and panels."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    depth: Tensor
    most: Tensor
    req_slots: Tensor
    count: Tensor  # first value: valid rows
    num_panels: Tensor  # first value: of the shortlist
    least: Tensor  # first value, as float32: probability from which drafts are verified
    planned_slots: Tensor  # KV slots of the tokens' positions, by depth
    # RoPE positions, [width, sections], and by depth, [depths, width, sections]; sections is 0 if rows have one each
    rotary: Tensor
    planned_rotary: Tensor
    panels: Tensor  # the shortlist's


class ChainInputs:
    """The inputs of a chain of drafts on the GPU, in one buffer that one copy uploads, and the chain's outputs: the
    drafts and their probabilities."""

    def __init__(self, rows: int, depths: int, panels: int, sections: int, device: torch.device) -> None:
        """panels: the most panels of a shortlist. sections: RoPE positions of a row; 0: one, its number."""
        self.width, self.depths, self._panels = -(-rows // ALIGN) * ALIGN, depths, panels
        self._sections = sections
        numbers = chain_numbers(self.width, depths, panels, sections)
        self.buffer = torch.zeros(numbers, dtype=torch.int32, device=device)
        c = self.columns(self.buffer)
        self.req_slots, self.count, self.least = c.req_slots, c.count[:1], c.least[:1].view(torch.float32)
        self.scored = ScoredPanels(c.panels, c.num_panels[:1])
        self.outputs = torch.zeros(2, depths, self.width, device=device)
        drafts = self.outputs[0].view(torch.int32)
        self.rows = ChainRows(
            *(
                c.token_ids,
                c.positions,
                c.kv_slots,
                c.depth,
                c.most,
                c.planned_slots,
                drafts,
                self.outputs[1],
            ),
            rotary=c.rotary if sections else None,
            planned_rotary=c.planned_rotary if sections else None,
        )

    def columns(self, buffer: Tensor) -> ChainColumns:
        """Returns the views of a buffer like this one's."""
        rows, panels = buffer[: len(buffer) - self._panels], buffer[len(buffer) - self._panels :]
        of_sections = self.width * self._sections
        numbers, first, by_depth = rows.tensor_split(
            [len(rows) - of_sections * (1 + self.depths), len(rows) - of_sections * self.depths]
        )
        *of_rows, kv_slots = numbers.view(-1, self.width).tensor_split([*range(1, NUMBERS + 1)])
        rotary = first.view(self.width, self._sections)
        planned_rotary = by_depth.view(self.depths, self.width, self._sections)
        ids, positions, of_first, depth, most, req_slots, count, num_panels, least = (
            row[0] for row in of_rows
        )
        return ChainColumns(
            *(ids, positions, of_first, depth, most, req_slots, count, num_panels, least),
            planned_slots=kv_slots,
            rotary=rotary,
            planned_rotary=planned_rotary,
            panels=panels,
        )


class GpuNextTokenBlock:
    def __init__(
        self,
        shape: ModelShape,
        weights: GpuWeights,
        kv: KvLayer,
        slots_ahead: Tensor,
        forms: Mapping[AttentionForm, GpuForm],
        heads: Mapping[int, tuple[GpuHead, HeadProduct | None]],
        floats: torch.dtype,
        max_rows: int,
        depths: int,
        queries: torch.dtype,
    ) -> None:
        """weights: the model's. kv: the block's. slots_ahead: int32 [requests, length], at each position the KV slot of
        the next one. forms, heads, floats, queries: the decoder's; heads by rows. max_rows: of a step. depths: most
        drafts of a row."""
        own = next_token_shape(shape)
        assert weights.next_token is not None
        assert weights.embedding is not None
        assert weights.output is not None
        self._shape, self._w, self._head, self._embedding = (
            own,
            weights.next_token,
            weights.output,
            weights.embedding,
        )
        self._heads = heads
        self._slots_ahead = slots_ahead
        self._layer = self._w.layer
        self._kv = kv
        device, hidden = slots_ahead.device, shape.hidden_size
        self._norms = JoinNorms(self._w.token_norm, self._w.state_norm, shape.rms_eps)
        sums = GpuSums(None, [None], None)
        self._ffn = GpuFfnBlock(own, [self._layer], device, None, None, None, sums)
        self._layers = GpuLayers(
            own, [self._layer], [kv], (), slots_ahead, None, dict(forms), self._ffn, sums, None
        )
        self._rows_at_once = min(max_rows, NEXT_TOKEN_ROWS)
        is_float = has_float_weights(replace(weights, layers=[self._layer]))
        self._spaces = make_workspaces(
            own, self._rows_at_once, floats, device, queries=queries, float_weights=is_float
        )
        self._joined = torch.empty(self._rows_at_once, 2 * hidden, device=device)
        self._inputs = {size: _activations(size, 2 * hidden, floats, device) for size in self._spaces}
        self._states = torch.zeros(max_rows, hidden, device=device)
        self._all_rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._kept = KeptStates.empty(len(slots_ahead), hidden, device)
        self._places = BlockPlaces.empty(max_rows, device)
        firsts = torch.arange(0, max_rows, self._rows_at_once, dtype=torch.int32, device=device)
        self._firsts = firsts[:, None].expand(-1, ALIGN).contiguous()
        self._counts = torch.zeros_like(self._firsts)
        self.chain_sizes = [
            size for size in step_sizes(min(len(slots_ahead) - 1, CHAIN_ROWS)) if size in self._spaces
        ]
        panels, sections = most_panels(shape.vocab_size), chain_sections(shape)
        self.chain = ChainInputs(self.chain_sizes[-1], depths, panels, sections, device)
        self._chain_states = torch.zeros(self.chain_sizes[-1], hidden, device=device)
        self._chosen = Chosen(self.chain_sizes[-1], device)

    # ---------------------------------------------------------------- in each step

    def take_step(self, batch: GpuBatch, add_and_norm: Callable[[GpuActivations, Tensor], None]) -> None:
        """Launches the keys and values of the step's rows, and keeps the requests' last states. add_and_norm: launches
        the model's hidden states of these rows, normalised."""
        size = len(batch.token_ids)
        states = self._states[:size]
        add_and_norm(GpuActivations(states, None, None), self._all_rows[:size])
        places = BlockPlaces(
            self._places.token_ids[:size], self._places.positions[:size], self._places.kv_slots[:size]
        )
        block_places(batch.token_ids, batch.positions, batch.kv_slots, batch.count, places)
        step = StepStates(states, batch.positions, batch.req_slots, batch.count)
        if size > self._rows_at_once:
            torch.sub(batch.count, self._firsts, out=self._counts)
            self._counts.clamp_(0, self._rows_at_once)
        for part, first in enumerate(range(0, size, self._rows_at_once)):
            rows = slice(first, min(first + self._rows_at_once, size))
            count = batch.count if size <= self._rows_at_once else self._counts[part, :1]
            rotary = None if batch.rotary_before is None else batch.rotary_before[rows]
            self._store(places, rows, step, count, rotary)
        keep_step(step, self._kept)

    def _store(
        self, places: BlockPlaces, rows: slice, step: StepStates, count: Tensor, rotary: Tensor | None
    ) -> None:
        """Launches the keys and values of some of a step's rows. rotary: see `GpuBatch.rotary_before`."""
        s = self._spaces[rows.stop - rows.start]
        self._embed(places.token_ids[rows], count, s, None)
        join_step(s.x, step, rows.start, self._kept, self._norms, count, self._joined[: s.rows])
        self._project(s, count)
        self._layers.norm_first(s, count)
        ids, positions, kv_slots = places.token_ids[rows], places.positions[rows], places.kv_slots[rows]
        batch = GpuBatch(
            *(count, ids, positions, kv_slots, step.req_slots[rows], s.rows, None), rotary_positions=rotary
        )
        self._layers.store(0, batch, s)

    def keep_rows(self, chosen: Tensor, count: int) -> None:
        """Launches the update of the requests' kept states from rows of the last step. chosen: see
        `kernels.next_token.op.keep_rows`."""
        keep_rows(self._states, chosen, count, self._kept)

    # ---------------------------------------------------------------- chains of drafts

    def begin(self, size: int) -> None:
        """Launches the input states of the first link, for the uploaded `chain` with up to `size` rows. CUDA graphs
        do not include it."""
        torch.index_select(self._kept.states, 0, self.chain.req_slots[:size], out=self._chain_states[:size])

    def takes_shortlist(self, size: int) -> bool:
        """Returns whether links of this size can score a part of the vocabulary."""
        head = self._head
        is_gemv = size <= gemv_tokens(head.rows) and head.second is None and head.bias is None
        return is_gemv and len(self.chain.scored.panels) > 0

    def link(self, size: int, *, of_shortlist: bool = False) -> None:
        """Launches the next draft of each of up to `size` rows. of_shortlist: scores only the vocabulary panels that
        `chain` lists."""
        c, s = self.chain, self._spaces[size]
        rows, count = c.rows, c.count
        ids, positions, kv_slots = rows.token_ids[:size], rows.positions[:size], rows.kv_slots[:size]
        req_slots, states = c.req_slots[:size], self._chain_states[:size]
        self._embed(ids, count, s, KvPlaces(self._slots_ahead, req_slots, positions, kv_slots))
        join_rows(s.x, states, self._norms, count, self._joined[:size])
        self._project(s, count)
        batch = GpuBatch(
            *(count, ids, positions, kv_slots, req_slots, size, None),
            rows_independent=True,
            rotary_positions=None if rows.rotary is None else rows.rotary[:size],
        )
        self._layers.forward(0, batch, s)
        head, by_quads = self._heads[size]
        self._ffn.add_and_norm(0, s, self._w.head_norm, count, head.final, self._all_rows[:size])
        scored = c.scored if of_shortlist else None
        if scored is not None:
            first = self._head.first
            weight = weight_of(plane_tensors(first), int(first.type), first.cols)
            multiply_panels(head.final, weight, scored.panels, scored.count, count, head.logits)
        elif by_quads is None:
            multiply(self._head, head.final, count, head.logits)
        else:
            by_quads(self._head, head.final, count, head.logits)
        if self._shape.logit_softcap:
            softcap(head.logits, self._shape.logit_softcap)
        assert head.final.x is not None
        states.copy_(head.final.x)
        draft_of(head.logits, count, self._chosen, rows, scored)

    def place_drafts(self, ids: Tensor, count: Tensor) -> None:
        """Launches the last chain's drafts as a step's tokens; see `kernels.next_token.op.place_drafts`."""
        place_drafts(ids, count, self.chain.rows, self.chain.least)

    def logits(self, size: int) -> Tensor:
        """The last link's logits: float32 [size, vocab]."""
        return self._heads[size][0].logits

    def _embed(self, ids: Tensor, count: Tensor, s: GpuWorkspace, places: KvPlaces | None) -> None:
        table = self._embedding
        scale = self._shape.embedding_scale
        embed(ids, count, plane_tensors(table), int(table.type), s.x, places, scale=scale)

    def _project(self, s: GpuWorkspace, count: Tensor) -> None:
        """Launches x = eh_proj joined."""
        x = self._inputs[s.rows]
        norm_rows(self._joined[: s.rows], None, 0.0, count, x.x, x.codes, x.scales)
        multiply(self._w.projection, x, count, s.x, s.dense)

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a link reads, without routed experts."""
        return self._w.dense_bytes + self._head.nbytes


def _activations(rows: int, cols: int, floats: torch.dtype, device: torch.device) -> GpuActivations:
    small = rows <= SMALL_BATCH_ROWS
    return GpuActivations.empty(rows, cols, device, dtype=torch.float32 if small else floats, quantised=small)

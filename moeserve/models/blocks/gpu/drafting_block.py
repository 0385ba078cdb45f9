"""The common part of the two kinds of layers that draft on a GPU: the model's own next-token block and an EAGLE-3 head.

`take_step` keeps up with a step: it computes the keys and values of the step's rows, whose tokens are all known, and
keeps each request's last hidden state. `clear_rows` stands in its place where the block need not keep up. `link`
computes one draft of each row of a chain; its token is the row's next input, so that a chain needs nothing from the
host. `place_drafts` hands the drafts to the step that verifies them.
These methods only launch kernels, so a CUDA graph can capture them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.embed.op import KvPlaces, embed
from moeserve.kernels.latent.op import norm_rows
from moeserve.kernels.linear.op import int8_tokens
from moeserve.kernels.linear.operands import weight_of
from moeserve.kernels.linear.panel_gemv import multiply_panels
from moeserve.kernels.linear.softcap import softcap
from moeserve.kernels.next_token.op import (
    BlockPlaces,
    Chosen,
    JoinNorms,
    KeptStates,
    SampledStep,
    StepStates,
    block_places,
    clear_rows,
    draft_of,
    join_rows,
    join_step,
    keep_rows,
    keep_step,
    place_drafts,
    start_after_step,
)
from moeserve.kernels.planes import Planes
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.gpu.chain_inputs import ALIGN, ChainInputs
from moeserve.models.blocks.gpu.head_product import GpuHead, HeadProduct
from moeserve.models.blocks.gpu.linear import multiply
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace, make_workspaces
from moeserve.models.head_shortlist import most_panels
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_inputs import GpuInput
from moeserve.models.loading.gpu_weights import plane_tensors
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.step_buffers import (
    CHAIN_ROWS,
    NEXT_TOKEN_ROWS,
    SMALL_BATCH_ROWS,
    chain_sections,
    step_sizes,
)

# Launches the model's residual, complete, through this norm: (norm, count, output, rows).
AddAndNorm = Callable[[GpuInput, Tensor, GpuActivations, Tensor], None]
Heads = Mapping[int, tuple[GpuHead, HeadProduct | None]]  # by rows


@dataclass(frozen=True, slots=True)
class BlockMatrices:
    """The embedding and the head with which a drafting layer's tokens are read and scored."""

    embedding: Planes
    embedding_scale: float
    output: MergedLinear  # [scored tokens, hidden]
    heads: Heads
    ids: Tensor | None = (
        None  # int32 [scored]: the scored tokens' ids in the model's vocabulary; None: they are these
    )


@dataclass(frozen=True, slots=True)
class BlockSizes:
    slots_ahead: Tensor  # int32 [requests, length], at each position of a request the KV slot of the next one
    max_rows: int  # of a step
    depths: int  # most drafts of a row
    floats: torch.dtype  # that the tensor cores multiply
    queries: torch.dtype  # see `make_workspaces`


class GpuDraftingBlock(ABC):
    def __init__(
        self,
        own: ModelShape,
        matrices: BlockMatrices,
        norms: JoinNorms,
        sizes: BlockSizes,
        kv: KvLayer,
        *,
        float_weights: bool,
    ) -> None:
        """own: the shape of the layer, as a model of one layer. norms: the norms of its inputs. kv: its KV.
        float_weights: whether the layer's weights are not quantised."""
        self._shape, self._matrices, self._norms, self._kv = own, matrices, norms, kv
        slots_ahead, max_rows, floats = sizes.slots_ahead, sizes.max_rows, sizes.floats
        self._slots_ahead = slots_ahead
        device, hidden = slots_ahead.device, own.hidden_size
        self._rows_at_once = min(max_rows, NEXT_TOKEN_ROWS)
        self._spaces = make_workspaces(
            own, self._rows_at_once, floats, device, queries=sizes.queries, float_weights=float_weights
        )
        self._joined = torch.empty(self._rows_at_once, 2 * hidden, device=device)
        self._inputs = {size: block_activations(size, 2 * hidden, floats, device) for size in self._spaces}
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
        panels = 0 if matrices.ids is not None else most_panels(own.vocab_size)
        self.chain = ChainInputs(self.chain_sizes[-1], sizes.depths, panels, chain_sections(own), device)
        self._chain_states = torch.zeros(self.chain_sizes[-1], hidden, device=device)
        self._chosen = Chosen(self.chain_sizes[-1], device)

    # ---------------------------------------------------------------- what differs

    @abstractmethod
    def _step_states(self, states: Tensor, count: Tensor, add_and_norm: AddAndNorm) -> None:
        """Launches the states of a step's rows, float32 [n, hidden], from the model's."""

    @abstractmethod
    def _store_joined(self, batch: GpuBatch, s: GpuWorkspace) -> None:
        """Launches the keys and values of rows whose inputs `_joined` has."""

    @abstractmethod
    def _mix(self, batch: GpuBatch, s: GpuWorkspace, states: Tensor, final: GpuActivations) -> None:
        """Launches the layer for rows whose inputs `_joined` has, and the norm before the head into `final`. states:
        the states before the rows, float32 [n, hidden], which become those of the next rows."""

    # ---------------------------------------------------------------- after each step

    def take_step(self, batch: GpuBatch, add_and_norm: AddAndNorm) -> None:
        """Launches the keys and values of the step's rows, and keeps the requests' last states."""
        size = len(batch.token_ids)
        states = self._states[:size]
        self._step_states(states, batch.count, add_and_norm)
        places = BlockPlaces(
            self._places.token_ids[:size], self._places.positions[:size], self._places.kv_slots[:size]
        )
        block_places(batch.token_ids, batch.positions, batch.kv_slots, batch.count, places)
        step = StepStates(states, batch.positions, batch.req_slots, batch.count)
        for rows, count in self._parts(size, batch.count):
            rotary = None if batch.rotary_before is None else batch.rotary_before[rows]
            self._store(places, rows, step, count, rotary)
        keep_step(step, self._kept)

    def clear_rows(self, kv_slots: Tensor, count: Tensor) -> None:
        """Launches the zeroing of these KV slots; see `clear_rows` of the kernels."""
        clear_rows(self._kv.tensors, kv_slots, count)

    def _parts(self, size: int, count: Tensor) -> list[tuple[slice, Tensor]]:
        """Launches the division of a step into parts of at most `_rows_at_once` rows. Returns these and the number of
        valid rows of each, until the next call."""
        if size <= self._rows_at_once:
            return [(slice(0, size), count)]
        torch.sub(count, self._firsts, out=self._counts)
        self._counts.clamp_(0, self._rows_at_once)
        firsts = range(0, size, self._rows_at_once)
        return [
            (slice(first, min(first + self._rows_at_once, size)), self._counts[part, :1])
            for part, first in enumerate(firsts)
        ]

    def _store(
        self, places: BlockPlaces, rows: slice, step: StepStates, count: Tensor, rotary: Tensor | None
    ) -> None:
        """Launches the keys and values of some of a step's rows. rotary: see `GpuBatch.rotary_before`."""
        s = self._spaces[rows.stop - rows.start]
        self._embed(places.token_ids[rows], count, s, None)
        join_step(s.x, step, rows.start, self._kept, self._norms, count, self._joined[: s.rows])
        ids, positions, kv_slots = places.token_ids[rows], places.positions[rows], places.kv_slots[rows]
        batch = GpuBatch(
            *(count, ids, positions, kv_slots, step.req_slots[rows], s.rows, None), rotary_positions=rotary
        )
        self._store_joined(batch, s)

    def keep_rows(self, chosen: Tensor, count: int) -> None:
        """Launches the update of `count` requests' kept hidden states from rows of the last step. chosen: int32, on the
        GPU; see `kernels.next_token.op.keep_rows`."""
        keep_rows(self._states, chosen, count, self._kept)

    # ---------------------------------------------------------------- chains of drafts

    def begin(self, size: int) -> None:
        """Launches the input states of the first link, for the uploaded `chain` with up to `size` rows. CUDA graphs
        do not include it."""
        torch.index_select(self._kept.states, 0, self.chain.req_slots[:size], out=self._chain_states[:size])

    def begin_after_step(self, size: int, step: SampledStep) -> None:
        """Launches the input states of the first link directly after a step whose tokens are only on the GPU: fills in
        tokens, positions and KV slots of the uploaded `chain`, and stores the hidden states before them as the
        requests' kept states."""
        c = self.chain
        states = self._chain_states[:size]
        start_after_step(step, c.sampled, self._states, c.req_slots, c.count, c.rows, states, self._kept)

    def takes_shortlist(self, size: int) -> bool:
        """Returns whether links of this size can score a part of the vocabulary."""
        output = self._matrices.output
        takes_int8 = size <= int8_tokens(output.rows) and output.second is None and output.bias is None
        return takes_int8 and len(self.chain.scored.panels) > 0

    def link(self, size: int, *, of_shortlist: bool = False) -> None:
        """Launches the next draft of each of up to `size` rows. of_shortlist: whether to score only the vocabulary
        panels that `chain` lists."""
        c, s = self.chain, self._spaces[size]
        rows, count = c.rows, c.count
        ids, positions, kv_slots = rows.token_ids[:size], rows.positions[:size], rows.kv_slots[:size]
        req_slots, states = c.req_slots[:size], self._chain_states[:size]
        self._embed(ids, count, s, KvPlaces(self._slots_ahead, req_slots, positions, kv_slots))
        join_rows(s.x, states, self._norms, count, self._joined[:size])
        batch = GpuBatch(
            *(count, ids, positions, kv_slots, req_slots, size, None),
            rows_independent=True,
            rotary_positions=None if rows.rotary is None else rows.rotary[:size],
        )
        head, by_quads = self._matrices.heads[size]
        self._mix(batch, s, states, head.final)
        scored, output = c.scored if of_shortlist else None, self._matrices.output
        if scored is not None:
            first = output.first
            weight = weight_of(plane_tensors(first), int(first.type), first.cols)
            multiply_panels(head.final, weight, scored.panels, scored.count, count, head.logits)
        elif by_quads is None:
            multiply(output, head.final, count, head.logits)
        else:
            by_quads(output, head.final, count, head.logits)
        if self._shape.logit_softcap:
            softcap(head.logits, self._shape.logit_softcap)
        draft_of(head.logits, count, self._chosen, rows, scored, self._matrices.ids)

    def place_drafts(self, ids: Tensor, count: Tensor) -> None:
        """Launches the last chain's drafts as a step's tokens; see `kernels.next_token.op.place_drafts`. count: int32
        [1] on the device, the number of valid rows."""
        place_drafts(ids, count, self.chain.rows, self.chain.least)

    def logits(self, size: int) -> Tensor:
        """The last link's logits: float32 [size, scored tokens]."""
        return self._matrices.heads[size][0].logits

    def _embed(self, ids: Tensor, count: Tensor, s: GpuWorkspace, places: KvPlaces | None) -> None:
        table, scale = self._matrices.embedding, self._matrices.embedding_scale
        embed(ids, count, plane_tensors(table), int(table.type), s.x, places, scale=scale)

    def _activate_joined(self, s: GpuWorkspace, count: Tensor) -> GpuActivations:
        """Launches `_joined` as activations of a product."""
        x = self._inputs[s.rows]
        norm_rows(self._joined[: s.rows], None, 0.0, count, x.x, x.codes, x.scales)
        return x

    @property
    def vocab_size(self) -> int:
        """Number of tokens that are scored."""
        return self._shape.vocab_size

    @property
    def has_ids(self) -> bool:
        """True if the scored tokens have other numbers than the text's tokens."""
        return self._matrices.ids is not None


def block_activations(rows: int, cols: int, floats: torch.dtype, device: torch.device) -> GpuActivations:
    """Returns the input of a product with `rows` rows."""
    small = rows <= SMALL_BATCH_ROWS
    return GpuActivations.empty(rows, cols, device, dtype=torch.float32 if small else floats, quantised=small)

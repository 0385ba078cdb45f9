"""The step buffers on the CPU. The decoder owns them; all layers reuse them."""

from __future__ import annotations

import copy

import torch

from moeserve.kernels.stream_operands import Activations, AdapterRows, RoutingWorkspace, StateSequences
from moeserve.models.compressed import CompressedAttentionShape, widest_products
from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.loading.cpu_weights import CpuWeights, GatedExperts
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.residual import (
    AttentionResiduals,
    HyperConnections,
    NgramShape,
    SinkhornConnections,
    StreamReading,
)
from moeserve.models.short_conv import ShortConvShape


class CpuBatch:
    """The rows of a step: their positions, KV slots, recurrent states and adapters. `CpuDecoder.begin` takes their
    token ids, `plan_attention` their sequences."""

    __slots__ = (
        "adapters", "first_positions", "has_window_plan", "kv_slots", "n", "positions", "states", "window_slots",
    )  # fmt: skip

    def __init__(
        self,
        n: int,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        states: StateSequences | None = None,
        adapters: AdapterRows | None = None,
        window_slots: torch.Tensor | None = None,
        *,
        has_window_plan: bool = False,
        first_positions: torch.Tensor | None = None,
    ) -> None:
        """positions: int32 [n], the rows' RoPE positions; [3, n] for a model with M-RoPE sections. kv_slots: int32 [n],
        the slot that each row's KV is written to. states: the sequences whose recurrent states the rows advance; None
        without recurrent layers. adapters: None if no row uses one. window_slots: int32 [n], the slots that windowed
        layers write to; None: kv_slots. has_window_plan: whether `plan_attention` got window_table or ends.
        first_positions: for an indexer, the positions of the first token of each row's block of keys, in the form of
        `positions`; None: all positions equal the tokens' numbers."""
        self.n = n
        self.positions = positions
        self.kv_slots = kv_slots
        self.states = states
        self.adapters = adapters
        self.window_slots = window_slots
        self.has_window_plan = has_window_plan
        self.first_positions = first_positions


class SandwichWorkspace:
    """Additional buffers of blocks between two norms."""

    def __init__(self, hidden: int, tokens: int, eps: float) -> None:
        self.eps = eps  # of post-norms
        self.block = torch.empty(tokens, hidden)  # output of a block, before its norm
        self.sum = Activations(tokens, hidden, q8=False)  # sum of a feed-forward's parts


class SinkhornWorkspace:
    """Additional buffers of a residual of several streams that are mixed, for one block at a time."""

    def __init__(self, shape: SinkhornConnections, hidden: int, tokens: int) -> None:
        self.count = shape.count
        self.normed = Activations(tokens, shape.count * hidden)
        self.products = torch.empty(tokens, shape.mix_values)
        self.head_products = torch.empty(tokens, shape.count)
        self.weights = torch.empty(tokens, shape.added_values)  # of the block's output, and of the mix
        self.block = torch.empty(tokens, hidden)  # output of a block


class StreamsWorkspace:
    """Additional buffers of a residual of several streams, for one block at a time."""

    def __init__(self, shape: HyperConnections, hidden: int, tokens: int) -> None:
        self.count = shape.count
        self.normed = Activations(tokens, shape.count * hidden)
        self.low_rank = torch.empty(tokens, shape.low_rank)
        self.gate_input = Activations(tokens, shape.low_rank)
        self.gate = torch.empty(tokens, shape.count * hidden)
        self.weights = torch.empty(tokens, shape.count)  # of the block's output, before the sigmoid
        self.block = torch.empty(tokens, hidden)  # output of a block


class AttendedWorkspace:
    """Additional buffers of attention residuals, for one block at a time. Owns `reading`, by which the block that last
    read the streams adds its output."""

    def __init__(self, shape: AttentionResiduals, hidden: int, tokens: int) -> None:
        self.count = shape.count
        self.block = torch.empty(tokens, hidden)  # output of a block
        self.reading: StreamReading | None = None  # None: no block has read yet


class NgramWorkspace:
    """Additional buffers of n-gram embeddings."""

    def __init__(self, shape: NgramShape, hidden: int, streams: int, tokens: int) -> None:
        self.embedded = torch.empty(tokens, shape.width)
        self.input = Activations(tokens, shape.width)
        self.keys = torch.empty(tokens, streams * hidden)
        self.values = torch.empty(tokens, hidden)
        self.factors = torch.empty(tokens, streams)


class LayerInputWorkspace:
    """Additional buffers of per-layer embeddings."""

    def __init__(self, shape: ModelShape, tokens: int) -> None:
        width = shape.layer_input_width
        self.all = torch.empty(tokens, shape.num_layers * width)  # inputs of all layers
        self.projected = torch.empty(tokens, shape.num_layers * width)
        self.gate = torch.empty(tokens, width)
        self.gated = Activations(tokens, width)


class DeltaWorkspace:
    """Additional buffers of recurrent layers."""

    def __init__(self, shape: GatedDeltaNetShape, tokens: int, within: Activations) -> None:
        self.inputs = [torch.empty(tokens, width) for _, width in shape.input_parts]
        # Low-rank inputs of the decays and output gates; then the decays and gates themselves.
        self.low_rank = [Activations(tokens, shape.gate_rank) for _ in shape.gate_parts]
        self.gates = [torch.empty(tokens, width) for _, width in shape.gate_parts]
        self.out = Activations(tokens, shape.heads.value_width, within=within)


class Mamba2Workspace:
    """Additional buffers of Mamba-2 layers."""

    def __init__(self, shape: Mamba2Shape, tokens: int, within: Activations) -> None:
        self.projected = torch.empty(tokens, shape.input_width)  # z, x, B, C and dt
        self.decays = torch.empty(tokens, shape.heads.num_heads)
        self.out = Activations(tokens, shape.heads.value_width, within=within)


class ShortConvWorkspace:
    """Additional buffers of short convolutions."""

    def __init__(self, shape: ShortConvShape, tokens: int, within: Activations) -> None:
        self.projected = torch.empty(tokens, shape.input_width)  # b, c and x
        self.out = Activations(tokens, shape.heads.value_width, within=within)


class LatentWorkspace:
    """Additional buffers of latent attention, for steps of up to `tokens` rows."""

    def __init__(self, shape: LatentAttentionShape, tokens: int) -> None:
        rows = tokens * shape.num_heads
        self.q_a = torch.empty(tokens, shape.q_rank) if shape.q_rank else None
        self.q_a_normed = Activations(tokens, shape.q_rank) if shape.q_rank else None
        self.q = torch.empty(tokens, shape.q_rows)
        self.latent = torch.empty(tokens, shape.head_dim)
        self.gate = torch.empty(tokens, shape.gate_width) if shape.gate_width else None
        # Outputs of all heads, if each number of them has a gate
        self.values = Activations(tokens, shape.output_width, q8=False) if shape.gate == "element" else None
        self.nope = Activations(rows, shape.nope_dim)  # non-rotary part of q, by head
        self.queries = Activations(tokens, shape.q_width, q8=False)
        self.attended = Activations(rows, shape.rank)  # by head


class CompressedWorkspace:
    """Additional buffers of compressed attention."""

    def __init__(self, layers: list[CompressedAttentionShape], tokens: int) -> None:
        shape = layers[0]
        self._tokens = tokens
        self.q_a = torch.empty(tokens, shape.q_rank)
        self.q_a_normed = Activations(tokens, shape.q_rank)
        self.kv = torch.empty(tokens, shape.head_dim)
        # Memory of the compressors' two products, of keys and of index keys.
        self._products = [
            (torch.empty(tokens * width), torch.empty(tokens * width)) for width in widest_products(layers)
        ]
        heads = shape.num_heads // shape.output_groups
        self.grouped = Activations(tokens * shape.output_groups, heads * shape.head_dim)
        self.attended = Activations(tokens, shape.q_width, q8=False, within=self.grouped)  # the same
        indexer = next((layer.indexer for layer in layers if layer.indexer is not None), None)
        self.index_q = None if indexer is None else torch.empty(tokens, indexer.q_width)
        self.index_weights = None if indexer is None else torch.empty(tokens, indexer.num_heads)

    def products(self, shape: CompressedAttentionShape) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (kv, gate) of each of a layer's compressors, float32 [tokens, width]."""
        return [
            (self._view(kv, each.width), self._view(gate, each.width))
            for (kv, gate), each in zip(self._products, shape.compressors, strict=False)
        ]

    def _view(self, memory: torch.Tensor, width: int) -> torch.Tensor:
        return memory[: self._tokens * width].view(self._tokens, width)


class IndexerWorkspace:
    """Additional buffers of an indexer."""

    def __init__(self, shape: IndexerShape | BlockIndexerShape, tokens: int) -> None:
        self.keys = torch.empty(tokens, shape.dim)  # before the norm
        # One weight per head; an indexer of blocks has none.
        self.weights = torch.empty(tokens, shape.num_heads if isinstance(shape, IndexerShape) else 0)
        self.q = torch.empty(tokens, shape.q_width)
        # Gates by which the tokens' index keys are pooled.
        self.gates = torch.empty(tokens, shape.gate_width if isinstance(shape, IndexerShape) else 0)


class LatentExpertWorkspace:
    """Additional buffers of experts between two matrices."""

    def __init__(self, width: int, tokens: int) -> None:
        self.product = torch.empty(tokens, width)  # into the experts, then out of them
        self.converted = Activations(tokens, width)  # the same, in the activation format of products


class NextTokenWorkspace:
    """Additional buffers of the next-token block."""

    def __init__(self, hidden: int, tokens: int) -> None:
        self.states = Activations(tokens, hidden, q8=False)  # hidden states: the model's, or the block's own
        self.token = Activations(tokens, hidden)  # normalised token embedding
        self.state = Activations(tokens, hidden)  # normalised hidden state


class CpuWorkspace:
    """Buffers for steps of up to `tokens` rows; `step_buffers.cpu_step_buffers` computes their size."""

    def __init__(
        self,
        shape: ModelShape,
        weights: CpuWeights,
        tokens: int,
        logit_rows: int,
        *,
        pinned: bool,
        has_adapters: bool = False,
    ) -> None:
        """pinned: whether x is in pinned memory, for a GPU to read. has_adapters: whether experts' intermediate rows
        are also kept in float32."""
        s = shape
        self.x = torch.empty(tokens, s.residual_width, pin_memory=pinned)  # the residual
        self.y = Activations(tokens, s.hidden_size)  # norm of x, the input of every block
        # As wide as the widest layer's q, k and v; forms.py makes narrower views.
        self.q = torch.empty(tokens, 0 if s.latent else s.q_width)
        self.k = torch.empty(tokens, s.kv_width)
        self.v = torch.empty(tokens, s.value_width)
        gate = torch.empty(tokens * max(s.gate_widths, default=0))
        # Output gates of attention, by their width per token.
        self.gates = {width: gate[: tokens * width].view(tokens, width) for width in s.gate_widths}
        self.widest_mixed = Activations(tokens, s.mixed_width)  # input of the mixers' output product
        self.sandwich = (
            SandwichWorkspace(s.hidden_size, tokens, s.eps_of_post_norms) if s.is_sandwiched else None
        )
        self.streams = _streams(s, tokens)
        count = s.residual_width // s.hidden_size
        self.ngrams = None if s.ngrams is None else NgramWorkspace(s.ngrams, s.hidden_size, count, tokens)
        self.inputs = LayerInputWorkspace(s, tokens) if s.layer_input_width else None
        self.next_token = None if s.next_token_layer is None else NextTokenWorkspace(s.hidden_size, tokens)
        self.latent = None if s.latent is None else LatentWorkspace(s.latent, tokens)
        compressed = [layer.mixer for layer in s.layers if isinstance(layer.mixer, CompressedAttentionShape)]
        self.compressed = CompressedWorkspace(compressed, tokens) if compressed else None
        self.indexer = None if s.indexer is None else IndexerWorkspace(s.indexer, tokens)
        recurrence, mixed = s.recurrence, self.widest_mixed
        self.delta = (
            DeltaWorkspace(recurrence, tokens, mixed) if isinstance(recurrence, GatedDeltaNetShape) else None
        )
        self.mamba2 = (
            Mamba2Workspace(recurrence, tokens, mixed) if isinstance(recurrence, Mamba2Shape) else None
        )
        self.short_conv = (
            ShortConvWorkspace(recurrence, tokens, mixed) if isinstance(recurrence, ShortConvShape) else None
        )
        latent = max((layer.moe.latent for layer in s.layers if layer.moe is not None), default=0)
        self.latent_experts = LatentExpertWorkspace(latent, tokens) if latent else None
        self.router_logits = torch.empty(tokens, s.num_experts)
        self.routing = RoutingWorkspace(tokens, s.num_experts, s.top_k)
        layers = weights.layers if weights.next_token is None else [*weights.layers, weights.next_token.layer]
        experts = [layer.moe.experts for layer in layers if layer.moe is not None]
        self.h = _between(tokens * s.top_k, s.expert_width, experts, has_adapters)
        unrouted = [layer.unrouted.experts for layer in layers if layer.unrouted is not None]
        self.unrouted_routing = RoutingWorkspace(tokens, 1, 1)
        widest = _between(tokens, s.unrouted_width, unrouted, has_adapters)
        # Intermediate rows of the feed-forwards that all tokens pass, by width.
        self.unrouted_h = {
            width: Activations(tokens, width, f32=len(widest.f32) > 0, q8=len(widest.q8) > 0, within=widest)
            for width in {layer.unrouted_width for layer in s.layers} - {0}
        }
        self.final = Activations(logit_rows, s.hidden_size)
        self.logits = torch.empty(logit_rows, s.vocab_size)

    def of_one_stream(self) -> CpuWorkspace:
        """Returns the same buffers for a residual of one vector, which takes the first part of x."""
        if self.streams is None:
            return self
        one = copy.copy(self)
        one.x = self.x.view(-1)[: len(self.x) * self.y.f32.shape[1]].view(len(self.x), -1)
        one.streams = None
        return one


def _streams(
    shape: ModelShape, tokens: int
) -> StreamsWorkspace | SinkhornWorkspace | AttendedWorkspace | None:
    if shape.streams is None:
        return None
    if isinstance(shape.streams, AttentionResiduals):
        return AttendedWorkspace(shape.streams, shape.hidden_size, tokens)
    if isinstance(shape.streams, SinkhornConnections):
        return SinkhornWorkspace(shape.streams, shape.hidden_size, tokens)
    return StreamsWorkspace(shape.streams, shape.hidden_size, tokens)


def _between(rows: int, width: int, experts: list[GatedExperts], has_adapters: bool) -> Activations:
    """Returns the activations between two products of experts, in the formats that the second product's weights and
    adapters read."""
    return Activations(
        rows,
        width,
        f32=has_adapters or any(not e.down.integer for e in experts),
        q8=any(e.down.integer for e in experts),
    )

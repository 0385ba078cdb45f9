"""The buffers of a step on the GPU, one workspace for each padded step size.

Steps run one after another, so the workspaces of all sizes share one arena. State that a kernel keeps between steps
(counters that it leaves at zero) has separate memory. `models/step_buffers.py` declares the arena's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.experts.integers import IntegerWorkspace
from moeserve.kernels.experts.op import BlockWorkspace
from moeserve.kernels.experts.quads import QuadWorkspace
from moeserve.kernels.latent.op import decode_workspace
from moeserve.kernels.linear.large_batch import BLOCK, FEW_BLOCK, UnpackScratch
from moeserve.models.attention import AttentionShape
from moeserve.models.blocks.gpu.arena_views import activations, narrowed, spare, views_of
from moeserve.models.blocks.gpu.compressed_workspace import compressed_workspace
from moeserve.models.blocks.gpu.latent_experts_workspace import LatentExpertsWorkspace
from moeserve.models.blocks.gpu.latent_workspace import IndexerWorkspace, LatentWorkspace
from moeserve.models.blocks.gpu.layer_input_workspace import LayerInputWorkspace
from moeserve.models.blocks.gpu.linear import dense_workspace, integer_rows
from moeserve.models.blocks.gpu.lora import GpuAdapterRows
from moeserve.models.blocks.gpu.recurrent_workspace import DeltaWorkspace, Mamba2Workspace
from moeserve.models.blocks.gpu.residual_workspace import NgramWorkspace, streams_workspace
from moeserve.models.buffers import GpuFloat
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.short_conv import ShortConvShape
from moeserve.models.step_buffers import (
    SIX_BIT_ROWS,
    SMALL_BATCH_ROWS,
    UNPACKED_EXPERTS_ROWS,
    gpu_arena_bytes,
    gpu_step_buffers,
    step_sizes,
    unpacks_experts,
)

MAX_DECODE_ROWS = 256  # decode attention has splits for this many rows; more rows are divided
# In steps with prompts, the few decode rows may have long contexts: rows per launch, and splits of a row's keys.
# (With one split, as for 256 rows, a row at position 8,000 took 15 ms of a 48-layer step.)
MIXED_DECODE_ROWS, MIXED_SPLITS = 64, 8
# Experts with codebooks that a small step must have room for, to unpack them: a launch for fewer leaves GPUs idle.
LEAST_IN_SCRATCH = 16
FLOATS: dict[torch.dtype, GpuFloat] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class GpuStateRows:
    """The sequences whose recurrent states a step's rows advance: the first `num_recurrent` token by token, the others
    in chunks of tokens."""

    sequences: StepSequences  # all of them
    num_recurrent: int  # number of the first ones; padding sequences have no rows
    chunked: StepSequences | None  # the others
    chunks: Tensor | None  # delta_net.op.chunks_of(chunked)


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """The rows of a step, on the device, padded to one of `step_sizes`: int32 [size] each."""

    count: Tensor  # int32 [1]: number of valid rows
    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor  # the slot that a row's KV is written to
    req_slots: Tensor  # the request slot: a row of the slot table
    num_decode: int  # number of the first rows, one per sequence; all rows of a small batch
    # For the prompts' rows: attention.op.prefill_tiles for each attention form; None without prompts.
    tiles: tuple[Tensor, ...] | None
    rows_independent: bool = False  # no row attends to another row's token of this step
    streamed: float = 0.0  # fraction of the RAM experts that is streamed to the GPU
    states: GpuStateRows | None = None  # None without recurrent layers
    # With tiles: int32 [1] for each MIXED_DECODE_ROWS of the first rows, how many of them are decode rows. `count`
    # includes the prompts' rows, for which decode attention has no room.
    decode_counts: tuple[Tensor, ...] | None = None
    adapters: GpuAdapterRows | None = None  # None: no row uses one
    window_slots: Tensor | None = (
        None  # int32 [size]: where the KV of windowed layers goes; None: to kv_slots
    )
    rotary_positions: Tensor | None = None  # int32 [size, 3], for models with sections; None: positions
    rotary_before: Tensor | None = (
        None  # int32 [size, 3]: rotary_positions of each row's previous token, for a next-token block
    )
    # int32 [size, 3]: rotary_positions of the first token of each row's block of keys, for an indexer of blocks
    rotary_firsts: Tensor | None = None
    # int32 [size]: in windowed layers, how many positions each row sees; None: up to its own. Rows of tiles see ahead
    # only if some row of the step does, `sees_ahead`.
    ends: Tensor | None = None
    sees_ahead: bool = False


class Routes(NamedTuple):
    """The routes of a layer's rows: for each token the experts that the router chose, then the feed-forwards that all
    tokens pass through."""

    expert_ids: Tensor  # int32 [rows, parts]
    local_expert_ids: Tensor  # index among the experts on this GPU; negative: not there
    streamed_expert_ids: Tensor  # index among the streamed experts
    weights: Tensor  # float32 [rows, parts]
    # [rows, parts, hidden]; for few rows [rows, 1, hidden], the sum; beside latent experts [rows, 1, hidden], the
    parts: Tensor  # output of the feed-forward that all tokens pass


class AttentionWorkspace(NamedTuple):
    """The buffers of attention for the layers with the same attention form (head widths, RoPE): they run one after
    another, so they share them."""

    q: Tensor  # [rows, heads, head_dim], of the dtype that keys are read as
    attended: GpuActivations
    decode: DecodeWorkspace
    mixed_decode: DecodeWorkspace  # in steps with prompts


class GpuWorkspace:
    """The buffers of steps of up to `rows` rows."""

    def __init__(
        self,
        shape: ModelShape,
        arena: Tensor,
        rows: int,
        floats: torch.dtype,
        decode: dict[AttentionForm, DecodeWorkspace],
        mixed_decode: dict[AttentionForm, DecodeWorkspace],
        *,
        queries: torch.dtype,
        float_weights: bool,
        adapter_rank: int,
        experts_here: int,
        length: int | None,
    ) -> None:
        """arena: uint8, shared with the workspaces of other sizes, as `decode` and `mixed_decode` may be. floats:
        dtype that the tensor cores multiply. queries: 16-bit dtype that attention reads keys as. adapter_rank, length:
        see `gpu_step_buffers`. experts_here: largest number of a layer's experts that one launch may use."""
        device = arena.device
        buffers = gpu_step_buffers(
            shape, rows, FLOATS[floats], float_weights=float_weights, adapter_rank=adapter_rank, length=length
        )
        views = views_of(arena, buffers)
        self.rows = rows
        self.is_small_batch = rows <= SMALL_BATCH_ROWS
        self.x = views["x"]
        self.deep = views.get("deep")  # [rows, deep_layers * hidden]; None without DeepStack
        # None: the residual is one vector.
        self.streams = None if shape.streams is None else streams_workspace(views, shape.streams)
        self.ngrams = NgramWorkspace(views) if shape.ngrams is not None else None
        self.layer_inputs = LayerInputWorkspace(views) if shape.layer_input_width else None
        self.latent_experts = LatentExpertsWorkspace(views) if shape.latent_expert_width else None
        self.y = activations(views, "y")
        self.projected = views["projected"]
        self.q = views["q"].view(queries)  # sized for the widest form
        self.forms = {
            each.form: AttentionWorkspace(
                _queries(self.q, each),
                activations(views, "attended", each.output_width),
                decode[each.form],
                mixed_decode[each.form],
            )
            for each in _attentions(shape)
        }
        self.latent = None if shape.latent is None else LatentWorkspace(views, shape.latent, rows)
        self.indexer = None if shape.indexer is None else IndexerWorkspace(views, shape.indexer, rows)
        self.compressed = compressed_workspace(views, shape, rows)
        recurrence = shape.recurrence
        self.delta = DeltaWorkspace(views, recurrence) if isinstance(recurrence, GatedDeltaNetShape) else None
        self.mamba2 = Mamba2Workspace(views, recurrence) if isinstance(recurrence, Mamba2Shape) else None
        self.short_conv = (
            activations(views, "attended", recurrence.heads.value_width)
            if isinstance(recurrence, ShortConvShape)
            else None
        )
        self.output = views["output"]
        self.router_input = views.get("router_input", views["y"])
        # Input of the routed experts, if it differs from that of the feed-forward that all tokens pass.
        self.experts_input = activations(views, "experts_input") if "experts_input" in views else None
        self.input_weights = views.get("input_weights")  # weights that this input was multiplied by, if any
        self.router_logits = views["router_logits"]
        self.h = activations(views, "h")
        # By number of parts that a layer sums per token.
        self.routes = {
            parts: _routes(views, parts, is_sum=self.is_small_batch or self.latent_experts is not None)
            for parts in {layer.num_parts for layer in shape.layers}
        }
        self.pool_sum = views["pool_sum"]
        self.adapter_shrunk = views.get("adapter_shrunk")
        self.adapter_gate_up = views.get("adapter_gate_up")
        rest = spare(arena, buffers, floats)
        has_scratch = "unpack_scratch" in views
        self.unpack_scratch = UnpackScratch(_larger(views["unpack_scratch"], rest)) if has_scratch else None
        self.dense = dense_workspace(views, self.unpack_scratch, floats)
        self.blocks = BlockWorkspace(
            rows,
            shape.top_k,
            experts_here,
            device,
            large_batch_block=_large_batch_block(rows, shape.top_k, shape.num_experts),
        )
        # Blocks and scratch for unpacked experts; None: the step is too small.
        has_unpacked = rows > UNPACKED_EXPERTS_ROWS and shape.num_experts
        self.unpacked_experts = self._for_unpacked_experts(shape, experts_here) if has_unpacked else None
        # For experts with codebooks, if the step's unused memory has room for enough of them.
        self.books = self._books(shape, rest, experts_here)
        # For experts whose types have quad-order kernels; None: the steps are too small or too large for them.
        self.quads = (
            QuadWorkspace(rows, shape.top_k, experts_here, views["quads"])
            if "quads" in views and floats == torch.bfloat16 and shape.num_experts
            else None
        )
        # For experts whose types have integers in float16; None: likewise.
        self.integers = (
            IntegerWorkspace(
                rows,
                shape.top_k,
                experts_here,
                integer_rows(views, "integer_x"),
                integer_rows(views, "integer_h"),
                takes_six_bits=rows <= SIX_BIT_ROWS,
            )
            if "integer_x" in views and floats == torch.bfloat16 and shape.num_experts
            else None
        )
        # Intermediate rows of the feed-forwards that all tokens pass, by width.
        widths = {layer.unrouted_width for layer in shape.layers} - {0}
        self.unrouted_h = {width: activations(views, "unrouted_h", width) for width in widths}
        self.dense_products = views.get("dense_products")
        self.unrouted_blocks = (
            BlockWorkspace(rows, 1, 1, device, large_batch_block=_large_batch_block(rows, 1, 1))
            if widths
            else None
        )

    def _for_unpacked_experts(
        self, shape: ModelShape, experts_here: int
    ) -> tuple[BlockWorkspace, UnpackScratch]:
        """Returns blocks, and a scratch for the numbers of the first and last expert: the step's, if it has them."""
        device, blocks = self.x.device, self.blocks
        if not blocks.is_large_batch:
            blocks = BlockWorkspace(self.rows, shape.top_k, experts_here, device, large_batch_block=BLOCK)
        return blocks, self.unpack_scratch or UnpackScratch(torch.empty(0, device=device))

    def _books(
        self, shape: ModelShape, spare: Tensor, experts_here: int
    ) -> tuple[BlockWorkspace, UnpackScratch] | None:
        """Returns blocks and room for steps that unpack experts only if they have codebooks. spare: [n], floats."""
        of_expert = 2 * shape.expert_width * shape.hidden_size
        if self.is_small_batch or self.blocks.is_large_batch or not shape.num_experts:
            return None
        if len(spare) // of_expert < min(LEAST_IN_SCRATCH, experts_here):
            return None
        blocks = BlockWorkspace(
            self.rows, shape.top_k, experts_here, spare.device, large_batch_block=FEW_BLOCK
        )
        return blocks, UnpackScratch(spare)


def _larger(unpacked: Tensor, rest: Tensor) -> Tensor:
    """Returns the memory for unpacked matrices, [n] floats: the step's buffer, or what only larger steps use if that is
    more. The more experts are unpacked at once, the fewer times their products are launched (4,096 tokens of 128
    experts: gate and up 0.84 ms at once, 1.10 in seven groups)."""
    return rest if len(rest) > len(unpacked) else unpacked


def make_workspaces(
    shape: ModelShape,
    max_tokens: int,
    floats: torch.dtype,
    device: torch.device,
    *,
    queries: torch.dtype = torch.float16,
    float_weights: bool,
    adapter_rank: int = 0,
    experts_here: int | None = None,
    length: int | None = None,
) -> dict[int, GpuWorkspace]:
    """Returns the workspaces of all step sizes, in one shared arena. experts_here: largest number of a layer's
    experts that one launch may use; None: all. length: see `gpu_step_buffers`."""
    nbytes = gpu_arena_bytes(
        shape,
        max_tokens,
        FLOATS[floats],
        float_weights=float_weights,
        adapter_rank=adapter_rank,
        length=length,
    )
    arena = torch.empty(nbytes, dtype=torch.uint8, device=device)
    sizes = step_sizes(max_tokens)
    by_rows: dict[int, dict[AttentionForm, DecodeWorkspace]] = {}
    largest = None  # all sizes share the largest one's memory: one step runs at a time
    for n in sorted({min(s, MAX_DECODE_ROWS) for s in sizes}, reverse=True):
        by_rows[n] = _decode_workspaces(shape, n, device, room=largest)
        largest = largest or by_rows[n]
    mixed = _decode_workspaces(shape, MIXED_DECODE_ROWS, device, MIXED_SPLITS, room=largest)
    return {
        size: GpuWorkspace(
            shape,
            arena,
            size,
            floats,
            by_rows[min(size, MAX_DECODE_ROWS)],
            mixed,
            queries=queries,
            float_weights=float_weights,
            adapter_rank=adapter_rank,
            experts_here=shape.num_experts if experts_here is None else experts_here,
            length=length,
        )
        for size in sizes
    }


def _attentions(shape: ModelShape) -> list[AttentionShape | LatentAttentionShape]:
    """Returns one layer's attention shape for each attention form."""
    mixers = [layer.mixer for layer in shape.layers]
    return list({a.form: a for a in mixers if isinstance(a, AttentionShape | LatentAttentionShape)}.values())


def _queries(memory: Tensor, shape: AttentionShape | LatentAttentionShape) -> Tensor:
    """Returns this form's queries [rows, heads, head_dim], a view of the memory for the widest form's."""
    if isinstance(shape, LatentAttentionShape):
        return memory.view(len(memory), shape.num_heads, -1)
    return narrowed(memory, shape.q_width).view(len(memory), shape.num_heads, shape.head_dim)


def _decode_workspaces(
    shape: ModelShape,
    rows: int,
    device: torch.device,
    splits: int | None = None,
    *,
    room: dict[AttentionForm, DecodeWorkspace] | None = None,
) -> dict[AttentionForm, DecodeWorkspace]:
    return {
        each.form: _decode_workspace(each, rows, device, splits, None if room is None else room[each.form])
        for each in _attentions(shape)
    }


def _decode_workspace(
    h: AttentionShape | LatentAttentionShape,
    rows: int,
    device: torch.device,
    splits: int | None,
    room: DecodeWorkspace | None,
) -> DecodeWorkspace:
    if isinstance(h, LatentAttentionShape):
        return decode_workspace(rows, h.num_heads, h.rank, h.rotary_dim, device, splits, room)
    return DecodeWorkspace(rows, h.num_heads, h.num_kv_heads, h.v_dim, device, splits, room)


def _large_batch_block(rows: int, top_k: int, experts: int) -> int | None:
    return BLOCK if unpacks_experts(rows, top_k, experts) else None


def _routes(views: dict[str, Tensor], parts: int, *, is_sum: bool) -> Routes:
    """is_sum: one part per row; otherwise one per route."""
    names = ("expert_ids", "local_expert_ids", "streamed_expert_ids", "route_weights")
    ids, local, streamed, weights = (narrowed(views[name], parts) for name in names)
    outputs = views["parts"]
    return Routes(ids, local, streamed, weights, outputs if is_sum else narrowed(outputs, parts))

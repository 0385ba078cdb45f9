"""The buffers of a step on the GPU, by the size that the step is rounded up to.

Steps run one after another, so the workspaces of all sizes lie over one another in one arena. What a kernel keeps
between steps (counters that it leaves at zero) has memory of its own. `models/step_buffers.py` declares the
arena's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.op import DecodeWorkspace
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.experts.op import BlockWorkspace
from moeserve.kernels.experts.quads import QuadWorkspace
from moeserve.kernels.latent.op import by_head, decode_workspace
from moeserve.kernels.linear.large_batch import UnpackScratch
from moeserve.kernels.linear.op import gemv_tokens
from moeserve.models.blocks.gpu.lora import GpuAdapterRows
from moeserve.models.interface import AttentionShape, ModelShape
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.recurrence import GatedDeltaNetShape, Recurrence
from moeserve.models.step_buffers import (
    ALIGNMENT,
    INT8_GROUP,
    SMALL_BATCH_ROWS,
    Buffer,
    GpuFloat,
    gpu_arena_bytes,
    gpu_step_buffers,
    step_sizes,
    unpacks_experts,
)

MAX_DECODE_ROWS = 256  # rows that decode attention has splits for; more go in parts
# Beside prompts there may be few such rows, with long contexts: how many go together, each in how many splits. (With
# the one split of 256 rows, a row 8,000 tokens on took a step of 48 layers 15 ms.)
MIXED_DECODE_ROWS, MIXED_SPLITS = 64, 8
FLOATS: dict[torch.dtype, GpuFloat] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class GpuStateRows:
    """The sequences whose recurrent states a step's rows advance: the first ones token by token, the others by
    chunks."""

    sequences: StepSequences  # all
    num_recurrent: int  # the first ones; padding among them has no rows
    chunked: StepSequences | None  # the others
    chunks: Tensor | None  # theirs, delta_net.op.chunks_of


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """The rows of a step, on the device, padded to a size of `step_sizes`: int32 [size] each."""

    count: Tensor  # int32 [1]: rows that exist
    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor  # where a row's KV goes
    req_slots: Tensor  # whose row of the slot table it reads
    num_decode: int  # the first rows, each of which attends by itself; of a small batch, all
    # Of the other rows, attention.op.prefill_tiles for each of the model's forms; None where there are none.
    tiles: tuple[Tensor, ...] | None
    rows_independent: bool = False  # no row attends to another row's token of this step
    streamed: float = 0.0  # part of the experts in RAM that comes to the GPU, instead of the rows to them
    states: GpuStateRows | None = None  # where the model has recurrent state
    # In a CUDA graph with prompts: int32 [1] each, how many of the first rows, MIXED_DECODE_ROWS together, attend by
    # themselves; None: all of num_decode.
    decode_counts: tuple[Tensor, ...] | None = None
    adapters: GpuAdapterRows | None = None  # None: no row asks for any
    window_slots: Tensor | None = (
        None  # int32 [size]: where the KV of windowed layers goes; None: to kv_slots
    )


class Routes(NamedTuple):
    """The routes of a layer whose tokens pass several feed-forwards each: the experts chosen by the router, then the
    shared ones."""

    expert_ids: Tensor  # int32 [rows, parts]
    local_expert_ids: Tensor  # the same as places among the GPU's experts
    streamed_expert_ids: Tensor  # among those streamed to it
    weights: Tensor  # float32 [rows, parts]
    parts: Tensor  # [rows, parts, hidden], of few rows [rows, 1, hidden]: the sum


class AttentionWorkspace(NamedTuple):
    """The workspace of the layers whose attention has one form."""

    q: Tensor  # of the type that keys are read as, [rows, heads, head_dim]
    attended: GpuActivations
    decode: DecodeWorkspace
    mixed_decode: DecodeWorkspace  # beside prompts


class KimiDeltaWorkspace(NamedTuple):
    """Further buffers of Kimi Delta Attention."""

    qkv: Tensor  # [rows, channels]
    low_rank: GpuActivations  # what a is made from, then what z is
    a: Tensor  # [rows, decays]
    z: Tensor  # [rows, value_width]


class DeltaWorkspace:
    """Further buffers of recurrent layers."""

    def __init__(self, views: dict[str, Tensor], shape: GatedDeltaNetShape) -> None:
        self.mixed = views["delta_mixed"]
        self.inverse = views.get("delta_inverse")
        self.kimi = None
        if shape.heads.is_kimi:
            low_rank = _activations(views, "delta_low_rank")
            self.kimi = KimiDeltaWorkspace(views["delta_qkv"], low_rank, views["delta_a"], views["delta_z"])
        self.out = _activations(views, "attended", shape.heads.value_width)


def _delta_space(views: dict[str, Tensor], shape: Recurrence | None) -> DeltaWorkspace | None:
    return DeltaWorkspace(views, shape) if isinstance(shape, GatedDeltaNetShape) else None


class LatentWorkspace:
    """Further buffers of latent attention."""

    def __init__(self, views: dict[str, Tensor], shape: LatentAttentionShape, rows: int) -> None:
        heads = shape.num_heads
        self.q_a = _activations(views, "q_a") if shape.q_rank else None
        self.q = views["latent_q"]
        self.nope = views["nope"].view(rows, heads, shape.nope_dim)
        self.queries = views["q"].view(rows, heads, shape.rank)
        self.rotated = views["rotated"].view(rows, heads, shape.rotary_dim)
        self.attended = views["latent_attended"].view(rows, heads, shape.rank)
        self.by_head = by_head(rows, heads, self.q.device)


class GpuWorkspace:
    """For steps of up to `rows` rows."""

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
    ) -> None:
        """arena: uint8, shared with the workspaces of other sizes, as `decode` and `mixed_decode` may be. floats: of
        what the tensor cores multiply. queries: 16 bits, as attention reads keys. adapter_rank: as `gpu_step_buffers`
        has it. experts_here: the most of a layer that a product takes."""
        device = arena.device
        buffers = gpu_step_buffers(
            shape, rows, FLOATS[floats], float_weights=float_weights, adapter_rank=adapter_rank
        )
        views = _views(arena, buffers)
        self.rows = rows
        self.is_small_batch = rows <= SMALL_BATCH_ROWS
        self.x = views["x"]
        self.y = _activations(views, "y")
        self.projected = views["projected"]
        self.q = views["q"].view(queries)  # of the widest form
        self.forms = {
            each.form: AttentionWorkspace(
                _queries(self.q, each),
                _activations(views, "attended", each.output_width),
                decode[each.form],
                mixed_decode[each.form],
            )
            for each in _attentions(shape)
        }
        self.latent = None if shape.latent is None else LatentWorkspace(views, shape.latent, rows)
        self.delta = _delta_space(views, shape.recurrence)
        self.output = views["output"]
        self.router_input = views.get("router_input", views["y"])
        # What routed experts read, where every token's feed-forward reads something else.
        self.experts_input = _activations(views, "experts_input") if "experts_input" in views else None
        self.input_weights = views.get("input_weights")  # by which that was multiplied, where it was
        self.router_logits = views["router_logits"]
        self.h = _activations(views, "h")
        # By how many feed-forwards a token of a layer adds up.
        self.routes = {
            parts: _routes(views, parts, self.is_small_batch)
            for parts in {layer.num_parts for layer in shape.layers}
        }
        self.pool_sum = views["pool_sum"]
        self.adapter_shrunk = views.get("adapter_shrunk")
        self.adapter_gate_up = views.get("adapter_gate_up")
        self.unpacked = UnpackScratch(views["unpacked"]) if "unpacked" in views else None
        self.blocks = BlockWorkspace(
            rows,
            shape.top_k,
            experts_here,
            device,
            is_large_batch=unpacks_experts(rows, shape.top_k, shape.num_experts),
        )
        # Of experts whose matrices are of types for it; None: steps are too small or too large.
        self.quads = (
            QuadWorkspace(rows, shape.top_k, experts_here, views["quads"])
            if "quads" in views and floats == torch.bfloat16 and shape.num_experts
            else None
        )
        # Of feed-forwards that every token passes, by their width.
        widths = {layer.unrouted_width for layer in shape.layers} - {0}
        self.unrouted_h = {width: _activations(views, "unrouted_h", width) for width in widths}
        self.dense_products = views.get("dense_products")
        self.unrouted_blocks = (
            BlockWorkspace(rows, 1, 1, device, is_large_batch=unpacks_experts(rows, 1, 1)) if widths else None
        )


class GpuHead:
    """Where up to `rows` rows become logits."""

    def __init__(self, shape: ModelShape, logits: Tensor, rows: int, floats: torch.dtype) -> None:
        """logits: float32 [rows or more, vocab]."""
        small = rows <= gemv_tokens(logits.shape[1])
        self.final = GpuActivations.empty(
            rows,
            shape.hidden_size,
            logits.device,
            dtype=torch.float32 if small else floats,
            quantised=small,
        )
        self.logits = logits[:rows]


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
) -> dict[int, GpuWorkspace]:
    """By size, over one another. experts_here: the most of a layer that a product takes; None: all."""
    nbytes = gpu_arena_bytes(
        shape, max_tokens, FLOATS[floats], float_weights=float_weights, adapter_rank=adapter_rank
    )
    arena = torch.empty(nbytes, dtype=torch.uint8, device=device)
    sizes = step_sizes(max_tokens)
    by_rows: dict[int, dict[AttentionForm, DecodeWorkspace]] = {}
    largest = None  # its memory is that of all: one step runs at a time
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
        )
        for size in sizes
    }


def _attentions(shape: ModelShape) -> list[AttentionShape | LatentAttentionShape]:
    """Some layer's of each form."""
    return list({a.form: a for layer in shape.layers if (a := layer.attention) is not None}.values())


def _queries(memory: Tensor, shape: AttentionShape | LatentAttentionShape) -> Tensor:
    """The queries of the form's heads, in the memory of the widest form's."""
    if isinstance(shape, LatentAttentionShape):
        return memory.view(len(memory), shape.num_heads, -1)
    return _narrowed(memory, shape.q_width).view(len(memory), shape.num_heads, shape.head_dim)


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
        return decode_workspace(rows, h.num_heads, h.rank, device, splits, room)
    return DecodeWorkspace(rows, h.num_heads, h.num_kv_heads, h.v_dim, device, splits, room)


def _views(arena: Tensor, buffers: tuple[Buffer, ...]) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    start = 0
    for buffer in buffers:
        region = arena[start : start + buffer.nbytes]
        views[buffer.name] = region.view(getattr(torch, buffer.dtype)).view(buffer.shape)
        start += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
    return views


def _activations(views: dict[str, Tensor], name: str, cols: int | None = None) -> GpuActivations:
    """cols: of narrower rows in the same memory."""
    x, codes, scales = views[name], views.get(f"{name}_codes"), views.get(f"{name}_scales")
    if cols is None or cols == x.shape[1]:
        return GpuActivations(x, codes, scales)
    groups = cols // INT8_GROUP
    return GpuActivations(
        _narrowed(x, cols),
        None if codes is None else _narrowed(codes, cols),
        None if scales is None else _narrowed(scales, groups),
    )


def _routes(views: dict[str, Tensor], parts: int, is_small_batch: bool) -> Routes:
    names = ("expert_ids", "local_expert_ids", "streamed_expert_ids", "route_weights")
    ids, local, streamed, weights = (_narrowed(views[name], parts) for name in names)
    outputs = views["parts"]
    return Routes(ids, local, streamed, weights, outputs if is_small_batch else _narrowed(outputs, parts))


def _narrowed(rows: Tensor, count: int) -> Tensor:
    """[n, m, ..] as [n, count, ..] with count <= m: from the beginning of the same memory, contiguous."""
    n, _, *rest = rows.shape
    return rows.view(-1)[: n * count * prod(rest)].view(n, count, *rest)

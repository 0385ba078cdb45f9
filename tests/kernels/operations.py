"""Each operation of CpuStream as a function: tensors in, tensors out, with guards around what may be written."""

from __future__ import annotations

import functools
from collections.abc import Sequence as List
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.attention.reference import Sequence
from moeserve.kernels.cpu_stream import AttentionPlan, CpuStream, LinearGroup, Matrix
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.routing.options import DEFAULT_ROUTER, RouterOptions
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer, RoutingWorkspace

GUARD = 12345.0  # stands where no operation may write


def is_usable(isa: str) -> bool:
    try:
        return CpuStream(1, isa).isa == isa
    except ValueError:
        return False


# avx512_vbmi differs from avx512_vnni in products of types with codebooks only, avx_vnni from avx2 in those of integer
# types (test_isa.py).
ISAS = [isa for isa in ("plain", "avx2", "avx512_vnni") if is_usable(isa)]
NARROWER = "avx_vnni" if is_usable("avx_vnni") else "avx2"  # what may be chosen in place of AVX-512
needs_both = pytest.mark.skipif(
    not {"avx2", "avx512_vnni"} <= set(ISAS), reason="this CPU does not have both vector instruction sets"
)
# For tests of many cases: plain takes three times as long as the others, and their other tests run it every time.
COSTLY_ISAS = [pytest.param(isa, marks=pytest.mark.slow) if isa == "plain" else isa for isa in ISAS]


@functools.cache
def stream_of(isa: str, threads: int | None = None) -> CpuStream:
    """threads: two by default for the best instruction set, one for the others. They spin while they wait for each
    other, which takes a multiple of the time where other tests run beside."""
    return CpuStream(threads or (2 if isa == ISAS[-1] else 1), isa)


def load(x: torch.Tensor) -> Activations:
    """float32 [n, cols] in both forms, the int8 one by the reference."""
    room = Activations(*x.shape)
    room.f32.copy_(x)
    room.q8.copy_(quantize(x).rows())
    return room


def head(x: Activations, n: int) -> Activations:
    """The first n rows, moved to where a read past them is a read of something else."""
    room = Activations(n, x.f32.shape[1])
    room.f32.copy_(x.f32[:n])
    room.q8.copy_(x.q8[:n])
    return room


def guarded(n: int, cols: int) -> torch.Tensor:
    return torch.full((n + 1, cols), GUARD)


def unguard(x: torch.Tensor) -> torch.Tensor:
    assert (x[-1] == GUARD).all(), "wrote past the end"
    return x[:-1]


def run_linear(
    stream: CpuStream,
    x: Activations,
    matrices: List[Matrix],
    residual: List[torch.Tensor] | None = None,
    biases: List[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """float32 [n, rows] for each matrix; with `residual`, added to it."""
    n = len(x.f32)
    out = [guarded(n, m.rows) for m in matrices]
    if residual is not None:
        for o, r in zip(out, residual, strict=True):
            o[:n] = r
    stream.linear(x, n, LinearGroup(list(matrices), biases), out, add=residual is not None)
    stream.wait()
    return [unguard(o) for o in out]


def run_norm(
    stream: CpuStream,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor | None = None,
    *,
    centered: bool = False,
) -> Activations:
    n = len(x) if rows is None else len(rows)
    y = Activations(n, x.shape[1])
    stream.norm(x, weight, eps, n, y, rows, centered=centered)
    stream.wait()
    return y


def run_rope_store(
    stream: CpuStream,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    kv: KvLayer,
    *,
    scale: float | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The new q; k and v go to kv. The arguments are those of the reference, and positions."""
    q, k, v = (t.clone() for t in qkv)
    heads = Heads(q.shape[1], k.shape[1], q.shape[2])
    stream.rope_store(
        q, k, v, *norms, eps, *tables, slots, kv, len(q), heads, scale=scale, positions=positions
    )
    stream.wait()
    return q


def ends_of(sequences: List[Sequence], n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]] | None:
    """For `build_attention_plan`; None where all sequences are causal."""
    if all(s.ends is None for s in sequences):
        return None
    ends = np.zeros(n, np.int32)
    for s in sequences:
        causal = np.arange(s.position + 1, s.position + s.count + 1)
        ends[s.row : s.row + s.count] = causal if s.ends is None else s.ends.numpy()
    return ends


def run_attention(
    stream: CpuStream,
    q: torch.Tensor,
    kv: KvLayer,
    sequences: List[Sequence],
    *,
    split: bool | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_softplus: bool = False,
    score_cap: float = 0.0,
    heads: Heads | None = None,
    plan: AttentionPlan | None = None,
    plan_threads: int | None = None,
) -> Activations:
    """`split`: whether a tile's segments are shared out to threads; by default the plan decides, for the stream's
    threads or for `plan_threads`. heads: of latent attention, whose result is by head. plan: to be built."""
    n, num, dim = q.shape
    heads = heads or Heads(num, kv.keys.shape[1], dim)
    longest = max(len(s.slots) for s in sequences)
    table = np.zeros((len(sequences) + 1, longest), np.int32)
    for i, s in enumerate(sequences):
        table[i + 1, : len(s.slots)] = s.slots

    def column(values: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.array(values, np.int32)

    plan = plan or AttentionPlan()
    build_attention_plan(
        plan,
        column([s.row for s in sequences]),
        column([s.count for s in sequences]),
        column([s.position for s in sequences]),
        column([i + 1 for i in range(len(sequences))]),
        table,
        heads,
        {None: plan_threads or stream.threads, False: 0, True: 1 << 20}[split],
        ends_of(sequences, n),
    )
    width = heads.value_width
    out = Activations(n * num, width) if heads.is_latent else Activations(n, num * width)
    stream.attention(
        plan, q, kv, out, heads, window=window, sinks=sinks, gate=gate, gate_softplus=gate_softplus,
        score_cap=score_cap,
    )  # fmt: skip
    stream.wait()
    return out


def run_route(
    stream: CpuStream,
    logits: torch.Tensor,
    top_k: int,
    router: RouterOptions = DEFAULT_ROUTER,
    bias: torch.Tensor | None = None,
) -> RoutingWorkspace:
    n, experts = logits.shape
    workspace = RoutingWorkspace(n, experts, top_k)
    stream.route(logits, n, workspace, router, bias=bias)
    stream.wait()
    return workspace


def run_shared_gate(stream: CpuStream, y: Activations, weight: torch.Tensor | None) -> RoutingWorkspace:
    n = len(y.f32)
    routing = RoutingWorkspace(n, 1, 1)
    stream.shared_gate(y, n, weight, routing)
    stream.wait()
    return routing


def run_experts(
    stream: CpuStream,
    y: Activations,
    matrices: tuple[Matrix, Matrix, Matrix],
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    counted: bool = True,
    **options: Any,
) -> torch.Tensor:
    """float32 [n, hidden]: residual (zeros without one) plus the chosen experts' sum. The token counts must add up.
    `options`: the activation and biases of `CpuStream.experts`."""
    gate, up, down = matrices
    n, top_k = ids.shape
    room = RoutingWorkspace(n, gate.experts, top_k)
    room.ids.copy_(ids)
    room.weights.copy_(weights)
    h = Activations(n * top_k, down.cols)
    x = guarded(n, down.rows)
    x[:n] = 0.0 if residual is None else residual
    counts = torch.full((2, gate.experts), 10, dtype=torch.int64)
    stream.experts(gate, up, down, y, n, room, h, counts if counted else None, x, **options)
    stream.wait()
    tokens = torch.bincount(ids.flatten(), minlength=gate.experts) * counted
    assert torch.equal(counts, 10 + torch.stack([tokens, (tokens > 0).long()]))
    return unguard(x)

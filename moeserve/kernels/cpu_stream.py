"""CpuStream: the C++ pool as a stream of operations on torch tensors.

Calls queue an operation and return; `wait()` blocks until all are done. Until then what was passed must stay
unread and unwritten, as with a GPU stream; the stream keeps it alive. What each operation computes is specified by
the `reference.py` of its folder. Shapes are row-major; n is the number of tokens of the step; every tensor is
contiguous and on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeserve.kernels import _C

Matrix = _C.Matrix
LinearGroup = _C.LinearGroup
AttentionPlan = _C.AttentionPlan


class Activations:
    """Room for up to `tokens` rows of `cols` activations, as float32 and as int8 with a scale per 32 columns.

    A form that no weight asks for may be left out. `f32`: float32 [tokens, cols]; `q8`: uint8 [tokens, 1.5 * cols],
    laid out as kernels.h describes.
    """

    def __init__(self, tokens: int, cols: int, *, f32: bool = True, q8: bool = True) -> None:
        self.f32 = torch.empty(tokens if f32 else 0, cols)
        self.q8 = torch.empty(tokens if q8 else 0, _C.quantized_row_bytes(cols), dtype=torch.uint8)
        self.native = _C.Activations(self.f32.data_ptr() if f32 else 0, self.q8.data_ptr() if q8 else 0, cols)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread of the pool runs. A node's threads stand side by side, nodes count from 0."""

    node: int = 0  # memory node
    cpus: tuple[int, ...] = ()  # what the thread is bound to; empty: not bound


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer of the KV pool: float16 [slots, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    num: int
    num_kv: int  # divides num
    dim: int  # a multiple of 32


class RoutingRoom:
    """Scratch of one MoE layer's routing for up to `tokens` tokens; the next layer reuses it."""

    def __init__(self, tokens: int, experts: int, top_k: int) -> None:
        self.ids = torch.empty(tokens, top_k, dtype=torch.int32)
        self.weights = torch.empty(tokens, top_k)
        self.starts = torch.empty(experts + 1, dtype=torch.int32)
        self.active = torch.empty(experts + 1, dtype=torch.int32)
        self.routes = torch.empty(tokens * top_k, dtype=torch.int32)


class CpuStream:
    def __init__(self, threads: int | Sequence[Place], isa: str = "") -> None:
        """`threads`: how many, unbound and on one memory node, or the place of each.
        `isa`: "plain", "avx2" or "avx512_vnni"; empty takes the best this CPU runs.

        Raises ValueError for an ISA that this CPU or build lacks.
        """
        places = [Place()] * threads if isinstance(threads, int) else threads
        self.nodes = 1 + max(place.node for place in places)
        self._native = _C.Stream([(place.node, list(place.cpus)) for place in places], isa)
        # What the queued operations point into. Without it a temporary (a batch's ids, a norm's weight) is freed
        # while the pool still reads it.
        self._held: list[object] = []

    @property
    def isa(self) -> str:
        return self._native.isa

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    def pool(self) -> _C.Pool:
        return self._native.pool

    def wait(self) -> None:
        self._native.wait()
        self._held.clear()

    def pack(self, source: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> Matrix:
        """GGUF rows of a matrix [out, in] or of experts [E, out, in] to panels; blocks until done.

        Raises ValueError for a type without kernels, MemoryError when there is no memory for it.
        """
        experts, rows, cols = (1, *shape) if len(shape) == 2 else shape
        return self._native.pack(source.ctypes.data, ggml_type, rows, cols, experts)

    def view(self, source: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> Matrix:
        """The same matrix in place: computed from the GGUF rows themselves, which must stay where they are."""
        experts, rows, cols = (1, *shape) if len(shape) == 2 else shape
        return self._native.view(source.ctypes.data, ggml_type, rows, cols, experts)

    def embed(
        self, table: npt.NDArray[np.uint8], ggml_type: int, ids: torch.Tensor, n: int, x: torch.Tensor
    ) -> None:
        """x[t] = row ids[t] of the table (GGUF rows, uint8 [.., rows, bytes]). ids: int32 [n], x: float32 [n, hidden].

        Raises IndexError, before anything is queued, for an id that is no row.
        """
        self._held.append((table, ids, x))
        rows = table.nbytes // table.shape[-1]
        self._native.embed(table.ctypes.data, ggml_type, rows, ids.data_ptr(), n, x.shape[1], x.data_ptr())

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        n: int,
        y: Activations,
        rows: torch.Tensor | None = None,
    ) -> None:
        """y[i] = RMSNorm(x[rows[i]]) * weight, quantised too where y has room for it. rows: int32 [n] or None."""
        self._held.append((x, weight, y, rows))
        index = 0 if rows is None else rows.data_ptr()
        self._native.norm(x.data_ptr(), weight.data_ptr(), eps, index, n, y.native)

    def linear(
        self, x: Activations, n: int, weights: LinearGroup, out: list[torch.Tensor], *, add: bool = False
    ) -> None:
        """out[j] = x W_j^T, or added to out[j] (a residual). out[j]: float32 [n, W_j.rows]."""
        self._held.append((x, weights, *out))
        self._native.linear(x.native, n, weights, [o.data_ptr() for o in out], add)

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KvLayer,
        n: int,
        heads: Heads,
    ) -> None:
        """Per-head RMSNorm of q and k, NeoX rotation, q scaled by 1/sqrt(dim); k and v into the KV pool.

        q [n, heads, dim] and k [n, kv_heads, dim] are changed in place; cos, sin: float32 [n, dim / 2];
        slots: int32 [n]. Raises IndexError, before anything is queued, for a slot that the pool lacks.
        """
        self._held.append((q, k, v, q_norm, k_norm, cos, sin, slots, kv))
        self._native.rope_store(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q_norm.data_ptr(),
            k_norm.data_ptr(),
            eps,
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            len(kv.keys),
            n,
            heads.num,
            heads.num_kv,
            heads.dim,
        )

    def attention(
        self, plan: AttentionPlan, q: torch.Tensor, kv: KvLayer, out: Activations, heads: Heads
    ) -> None:
        """Causal paged GQA attention of the plan's rows. q: float32 [n, heads, dim]; out: [n, heads * dim]."""
        self._held.append((plan, q, kv, out))
        self._native.attention(
            plan,
            q.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            out.native,
            heads.num,
            heads.num_kv,
            heads.dim,
        )

    def route(self, logits: torch.Tensor, n: int, room: RoutingRoom) -> None:
        """room.ids, room.weights [n, top_k] of the largest softmax weights, renormalised. logits: [n, experts]."""
        self._held.append((logits, room))
        experts, top_k = logits.shape[1], room.ids.shape[1]
        self._native.route(logits.data_ptr(), n, experts, top_k, room.ids.data_ptr(), room.weights.data_ptr())

    def experts(
        self,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        y: Activations,
        n: int,
        room: RoutingRoom,
        h: Activations,
        heat: torch.Tensor,
        x: torch.Tensor,
    ) -> None:
        """x[t] += sum_j weights[t, j] * down(silu(gate(y[t])) * up(y[t])) of expert ids[t, j].

        h: room for n * top_k intermediate rows of the experts' width. x: float32 [n, hidden].
        heat: int64 [2, experts], to which are added each expert's tokens and 1 if it has any (its weights
        were read once).
        """
        self._held.append((gate, up, down, y, room, h, heat, x))
        self._native.experts(
            gate,
            up,
            down,
            y.native,
            room.ids.data_ptr(),
            room.weights.data_ptr(),
            n,
            room.ids.shape[1],
            h.native,
            room.starts.data_ptr(),
            room.active.data_ptr(),
            room.routes.data_ptr(),
            heat.data_ptr(),
            x.data_ptr(),
        )

    def read(self, matrix: Matrix) -> None:
        """Reads every byte of the matrix: the memory's speed without any arithmetic."""
        self._held.append((matrix,))
        self._native.read(matrix)


def build_attention_plan(
    plan: AttentionPlan,
    rows: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    req_slots: npt.NDArray[np.int32],
    slot_table: npt.NDArray[np.int32],
    heads: Heads,
    threads: int,
) -> None:
    """Sequence i: rows rows[i] .. +counts[i]-1 of the step, at positions[i] on, KV slots in slot_table[req_slots[i]].

    The arrays need not outlive the call, but for slot_table (int32 [max_num_seqs, max_model_len], C order). Raises
    IndexError for rows, positions or request slots that the table has no place for.
    """
    plan.build(
        len(rows),
        rows.ctypes.data,
        counts.ctypes.data,
        positions.ctypes.data,
        req_slots.ctypes.data,
        slot_table.ctypes.data,
        slot_table.shape[0],
        slot_table.shape[1],
        heads.num,
        heads.num_kv,
        heads.dim,
        threads,
    )

"""CpuStream: the C++ pool as a stream of operations on torch tensors.

A call launches an operation and returns; `wait()` blocks until all are done. Until then, as with a GPU stream, the
arguments must be neither read nor written; the stream keeps them alive. The `reference.py` in an operation's folder
specifies its result. Shapes are row-major; n is the number of the step's tokens; all tensors are contiguous, on the
CPU, float32 unless stated otherwise, and may have more than n rows.

Each call checks its tensors before launching (in C++, csrc/bindings/stream.cpp: 30 ns per tensor). It raises
ValueError, starting with the argument's name, for a wrong dtype, device, stride or size, and IndexError for a token
id, row or KV slot out of range. `repeat` checks nothing anew: its tensors are those of the recorded calls.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moeserve.kernels import _C
from moeserve.kernels.codebooks import bring_codebook
from moeserve.kernels.compressed_operations import CompressedOperations
from moeserve.kernels.gating import OAI_ALPHA, Activation, limit_of
from moeserve.kernels.host_arrays import gguf_rows
from moeserve.kernels.index_operations import IndexOperations
from moeserve.kernels.recurrent_operations import RecurrentOperations
from moeserve.kernels.residual_operations import ResidualOperations
from moeserve.kernels.routing.options import DEFAULT_ROUTER, RouterOptions
from moeserve.kernels.stream_operands import (
    Activations,
    AdapterRows,
    DiskLayer,
    ExpertAdapters,
    Heads,
    KvLayer,
    RoutingWorkspace,
)

Matrix = _C.Matrix
LinearGroup = _C.LinearGroup
LoraTable = _C.LoraTable
AttentionPlan = _C.AttentionPlan


class CpuStream(RecurrentOperations, ResidualOperations, IndexOperations, CompressedOperations):
    def pack(
        self,
        source: npt.NDArray[np.uint8],
        ggml_type: int,
        shape: tuple[int, ...],
        order: torch.Tensor | None = None,
    ) -> Matrix:
        """Returns a copy, repacked into panels, of a matrix [out, in] or of experts' matrices [E, out, in]. source:
        uint8, the bytes of their GGUF rows, which need not stay. Blocks until done. order: int32 [in] or [E, in], the
        input column that each column of the rows multiplies; None: the same one. `linear`, `linear_panels` and, for
        gate and up, `experts` accept matrices with an order and gather their input.

        Raises ValueError for a type without kernels, and MemoryError. ggml_type: ggml's number of the weights'
        type.
        """
        bring_codebook(ggml_type)
        experts, rows, cols = (1, *shape) if len(shape) == 2 else shape
        matrix = self._native.pack(*gguf_rows(source, "source"), ggml_type, rows, cols, experts)
        if order is not None:
            matrix.set_order(order)
        return matrix

    def view(self, source: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> Matrix:
        """Returns a matrix that computes from the GGUF rows in place, without a copy: `source` must stay at its address
        as long as the matrix. source: uint8, the rows' bytes; shape: (rows, cols), or (experts, rows, cols); ggml_type:
        ggml's number of the weights' type."""
        bring_codebook(ggml_type)
        experts, rows, cols = (1, *shape) if len(shape) == 2 else shape
        return self._native.view(*gguf_rows(source, "source"), ggml_type, rows, cols, experts)

    def slots(self, ggml_type: int, shape: tuple[int, int, int]) -> Matrix:
        """Returns a packed matrix of shape [slots, out, in] for experts on disk. It takes no RAM until `DiskExperts`
        is opened. Raises ValueError for a type without kernels, and MemoryError. ggml_type: ggml's number of the
        weights' type."""
        bring_codebook(ggml_type)
        count, rows, cols = shape
        return self._native.slots(ggml_type, rows, cols, count)

    def embed(
        self,
        table: npt.NDArray[np.uint8],
        ggml_type: int,
        ids: torch.Tensor,
        n: int,
        x: torch.Tensor,
        *,
        scale: float = 1.0,
        copies: int = 1,
    ) -> None:
        """Computes x[t] = row ids[t] of the table (GGUF rows, uint8) times `scale`, `copies` times one after another.
        ids: int32 [n], x: [n, copies * hidden]. ggml_type: ggml's number of the weights' type."""
        bring_codebook(ggml_type)
        self._native.embed(*gguf_rows(table, "table"), ggml_type, ids, n, x, scale, copies)
        self._held.append((table, ids, x))

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        n: int,
        y: Activations,
        rows: torch.Tensor | None = None,
        *,
        centered: bool = False,
    ) -> None:
        """Computes y[i] = RMSNorm(x[rows[i]]) * weight, quantised too where y has room for it. rows: int32 [n] or None.
        centered: the mean is subtracted first (LayerNorm). eps: added to the mean square under the norm's root, with
        centered to the variance."""
        self._native.norm(x, weight, eps, n, y.native, rows, centered)
        self._held.append((x, weight, y, rows))

    def add_norm(
        self,
        source: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        n: int,
        x: torch.Tensor,
        *,
        factor: float = 1.0,
    ) -> None:
        """Computes x[t] = (x[t] + RMSNorm(source[t]) * weight) * factor. source, x: [n, hidden], not the same memory.
        eps: added to the mean square under the norm's root."""
        self._native.add_norm(source, weight, eps, n, x, factor)
        self._held.append((source, weight, x))

    def softcap(self, x: torch.Tensor, n: int, cap: float) -> None:
        """Computes x[t] = cap * tanh(x[t] / cap). x: [n, cols], 16 divides cols."""
        self._native.softcap(x, n, cap)
        self._held.append((x,))

    def gelu_gate(
        self, gate: torch.Tensor | None, up: torch.Tensor, column: int, n: int, out: Activations
    ) -> None:
        """Computes out[t] = gelu(gate[t]) * up[t], with GELU's tanh form; with gate None, out[t] = up[t] (no GELU).
        Also writes the quantised values if `out` has buffers for them.

        gate: [n, cols]; up: [n, any], of which the columns from `column` on are read; out: [n, cols]."""
        self._native.gelu_gate(gate, up, column, n, out.native)
        self._held.append((gate, up, out))

    def linear(
        self, x: Activations, n: int, weights: LinearGroup, out: list[torch.Tensor], *, add: bool = False
    ) -> None:
        """Computes out[j] = x W_j^T + b_j, or that added to out[j] (a residual). out[j]: [n, W_j.rows]."""
        self._native.linear(x.native, n, weights, out, add)
        self._held.append((x, weights, *out))

    def linear_panels(
        self, x: Activations, n: int, weights: Matrix, panels: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Computes only some panels of PANEL_ROWS output rows: out[t, i] = W[panels[i]] x[t]. panels: int32 [m];
        out: [n, PANEL_ROWS * m], -inf for rows missing in the last panel."""
        self._native.linear_panels(x.native, n, weights, panels, out)
        self._held.append((x, weights, panels, out))

    def lora(
        self,
        x: Activations,
        n: int,
        rows: AdapterRows,
        tables: list[LoraTable | None],
        out: list[torch.Tensor],
        shrunk: torch.Tensor,
    ) -> None:
        """Computes out[j][t] += B_j (A_j x[t]) for rows with an adapter, using that adapter's A and B.

        x: [n, cols], read as float32. out[j]: [n, tables[j].rows]; None in `tables`: out[j] stays unchanged. shrunk:
        float32 workspace for len(tables) * rows vectors of the largest rank."""
        self._native.lora(x.native, n, rows.sorted, rows.adapters, tables, out, shrunk)
        self._held.append((x, rows, tables, shrunk, *out))

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KvLayer,
        n: int,
        heads: Heads,
        *,
        scale: float | None = None,
        v_norm: torch.Tensor | None = None,
        v_from_k: bool = False,
        v_scale: float = 1.0,
        norm_after: bool = False,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Normalises q and k (RMSNorm), rotates them as NeoX does, multiplies q by `scale` (None: 1/sqrt(dim)), and
        stores k and v in the KV pool.

        q [n, heads, dim], k [n, kv_heads, dim] and v [n, kv_heads, value_dim] are changed in place. q_norm, k_norm:
        [dim] for a norm per head, [heads * dim] and [kv_heads * dim] for one over all heads, None for none. cos, sin:
        [n, rotary_dim / 2]; the first rotary_dim (a multiple of 32) dimensions of each head are rotated. slots: int32
        [n]. positions, int32 [n]: cos and sin have all positions' angles, and row i uses positions[i]. v_norm
        [value_dim]: first v = RMSNorm(v) * v_norm per head; with `v_from_k`, RMSNorm(k) of k as projected overwrites
        v. v_scale: multiplies v, last. norm_after: the norms of heads come after RoPE. Without k and v, only q
        changes, and nothing is stored. eps: added to the mean square under the norm's root.
        """
        self._native.rope_store(
            q, k, v, q_norm, k_norm, eps, cos, sin, positions, slots, kv, n, heads.num, heads.num_kv, heads.dim,
            heads.value_width, scale, v_norm, v_from_k, v_scale, norm_after,
        )  # fmt: skip
        self._held.append((q, k, v, q_norm, k_norm, cos, sin, positions, slots, kv, v_norm))

    def attention(
        self,
        plan: AttentionPlan,
        q: torch.Tensor,
        kv: KvLayer,
        out: Activations,
        heads: Heads,
        *,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        gate_softplus: bool = False,
        score_cap: float = 0.0,
    ) -> None:
        """Computes paged attention of the plan's rows into `out`, causal unless the plan has ends. q: [n, heads, dim];
        out: [n, heads * value_dim], for latent attention also [n * heads, value_dim].

        window above 0: a position sees itself and the window - 1 positions before it; up to 31 slots before these
        are still read and must hold finite values. sinks [heads]: an additional logit in each head's softmax,
        without a value. gate [n, heads * value_dim], or [n, heads] for one number per head: out is multiplied by
        its sigmoid, or with gate_softplus (only per head) by its softplus. score_cap c above 0: scores become c *
        tanh(score / c); only of a float16 cache.
        """
        self._native.attention(
            plan, q, kv, out.native, heads.num, heads.num_kv, heads.dim, heads.value_width, heads.is_latent,
            window, sinks, gate, gate_softplus, score_cap,
        )  # fmt: skip
        self._held.append((plan, q, kv, out, sinks, gate))

    def latent_store(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KvLayer,
        n: int,
        heads: int,
        scale: float,
        nope: Activations,
        queries: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Prepares q and stores the latent vectors of latent attention, as latent/reference.py specifies.
        positions: as in `rope_store`.

        q [n, heads, nope + rotary]; latent [n, rank + rotary]; norm [rank]; cos, sin [n, rotary / 2]; slots int32 [n].
        nope: [n * heads, nope]. queries [n, heads, rank + rotary]: the last `rotary` numbers of each head are written.
        All widths are multiples of 32. eps: added to the mean square under the norm's root."""
        self._native.latent_store(
            q, latent, norm, eps, cos, sin, positions, slots, kv.keys, n, heads, scale, nope.native, queries
        )
        self._held.append((q, latent, norm, cos, sin, positions, slots, kv, nope, queries))

    def linear_by_head(self, x: Activations, n: int, weights: Matrix, out: Activations) -> None:
        """Computes out[t, h] = W_h x[t, h], with one matrix per head. x: [n * heads, cols]; weights: [heads, rows,
        cols]; out: [n, heads * any], of which the first `rows` numbers of each head are written; also quantised if out
        has the int8 form."""
        self._native.linear_by_head(x.native, n, weights, out.native)
        self._held.append((x, weights, out))

    def route(
        self,
        logits: torch.Tensor,
        n: int,
        workspace: RoutingWorkspace,
        router: RouterOptions = DEFAULT_ROUTER,
        *,
        bias: torch.Tensor | None = None,
        expert_scale: torch.Tensor | None = None,
        by_token: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Writes each token's experts to workspace.ids and workspace.weights [n, top_k]. logits: [n, experts].

        bias [experts]: added to scores for choosing, not to weights. expert_scale [experts]: multiplies a chosen
        expert's weight. by_token: int32 [vocab, top_k], the experts of each token id, and int32 [n], the rows' token
        ids: these experts are taken, and weighed by their scores.
        """
        r, ids, weights = router, workspace.ids, workspace.weights
        table, tokens = (None, None) if by_token is None else by_token
        self._native.route(
            logits, n, ids, weights, r.scoring, r.normalize, r.scale, r.groups, r.top_groups, r.group_best, bias,
            expert_scale, table, tokens,
        )  # fmt: skip
        self._held.append((logits, workspace, bias, expert_scale, by_token))

    def shared_gate(
        self, y: Activations, n: int, weight: torch.Tensor | None, routing: RoutingWorkspace
    ) -> None:
        """Writes the routes of a shared expert, to be run by `experts` as a single expert: ids 0, weights
        sigmoid(y[t] . weight).

        weight: [hidden]; None: all weights are 1. routing: for one expert and top_k 1.
        """
        self._native.shared_gate(y.native, n, weight, routing.ids, routing.weights)
        self._held.append((y, weight, routing))

    def experts(
        self,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        y: Activations,
        n: int,
        routing: RoutingWorkspace,
        h: Activations,
        expert_token_counts: torch.Tensor | None,
        x: torch.Tensor,
        *,
        activation: Activation = "silu",
        limit: float | None = None,
        alpha: float = OAI_ALPHA,
        weighs_input: bool = False,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        lora: ExpertAdapters | None = None,
        add: bool = True,
        disk: DiskLayer | None = None,
    ) -> None:
        """Computes x[t] += sum_j weights[t, j] * down(activation(gate(y[t]), up(y[t]))) of expert ids[t, j]; without
        `add`, x[t] = the sum.

        h: workspace for n * top_k intermediate rows of the experts' width ff, a multiple of 32. x: [n, hidden].
        gate_bias, up_bias [E, ff], down_bias [E, hidden]: added to the products. expert_token_counts: int64 [2,
        experts], to which each expert's tokens are added, and 1 if it has any (its weights were read once); None:
        not counted. Experts without a gate pass the same matrix as gate and up; its product is computed once. A dense
        feed-forward is one expert with `shared_gate`'s routes. lora: the adapters' terms of the products; h then has
        both forms. limit, alpha: of the activation, see experts/reference.py. weighs_input: a weight multiplies an
        expert's input, not its output. disk: the matrices are slots of experts on disk; the call then waits for
        all earlier operations and for the disk, and routes of tokens whose experts cannot be read become -1
        (`DiskExperts.take_failures`)."""
        r, counts = routing, expert_token_counts
        self._native.experts(
            gate, up, down, y.native, n, r.ids, r.weights, r.starts, r.active, r.routes, h.native, counts, x,
            activation, limit_of(activation, limit), alpha, weighs_input, gate_bias, up_bias, down_bias, lora, add,
            disk,
        )  # fmt: skip
        self._held.append(
            (gate, up, down, y, routing, h, counts, x, gate_bias, up_bias, down_bias, lora, disk)
        )

    def read(self, matrix: Matrix) -> None:
        """Reads every byte of the matrix without arithmetic, to measure memory bandwidth."""
        self._native.read(matrix)
        self._held.append((matrix,))

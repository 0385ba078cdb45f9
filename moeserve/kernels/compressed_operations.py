"""The operations of `CpuStream` before and after compressed attention: compressed/reference.py."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeserve.kernels import _C
from moeserve.kernels.operation_queue import OperationQueue
from moeserve.kernels.stream_operands import Activations, KvLayer, StateLayer, StateSequences


class RowAngles(NamedTuple):
    """Angles of all positions, float32 [positions, rotary / 2], and the rows' positions, int32 [n]."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


class CompressorParameters(NamedTuple):
    """A compressor's weights, all float32."""

    bias: torch.Tensor  # [ratio, width]
    norm: torch.Tensor  # [dim]


class CompressedOperations(OperationQueue):
    """The part of `CpuStream` with the operations of compressed attention. `CpuStream` describes arguments
    and errors."""

    def compressed_store(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        scale: float,
        angles: RowAngles,
        plan: _C.CompressedPlan,
        layer: KvLayer,
        n: int,
        heads: int,
        *,
        index_q: torch.Tensor | None = None,
        index_heads: int = 0,
    ) -> None:
        """Normalises, scales and rotates q [n, heads * dim] in place, and stores the tokens' keys, made from kv [n,
        dim], in the rows that the plan names. index_q [n, index_heads * any]: rotated in place. eps: added to the mean
        square under the norm's root."""
        self._native.compressed_store(
            q, kv, norm, eps, *angles, plan, layer.keys, n, heads, scale, index_q, index_heads
        )
        self._held.append((q, kv, norm, angles, plan, layer, index_q))

    def compress(
        self,
        kv: torch.Tensor,
        gate: torch.Tensor,
        w: CompressorParameters,
        eps: float,
        angles: RowAngles,
        slots: torch.Tensor,
        entries: torch.Tensor,
        state: StateLayer,
        sequences: StateSequences,
        n: int,
        pending: torch.Tensor | None = None,
    ) -> None:
        """Adds the tokens' kv and gate [n, width] to their sequences' states, and stores the entries of the blocks
        that they complete, each in the last token's row of `entries`, float16 [slots, 1, dim]. kv is overwritten.
        pending: float32 [records, pending_values], needed if rows have drafts. A token's entry does not depend on how
        its sequence is divided into steps. eps: added to the mean square under the norm's root."""
        s = sequences
        drafts, kept = (None, None) if s.drafts is None else (s.drafts.drafts, s.drafts.first)
        self._native.compress(
            kv, gate, w.bias, w.norm, eps, *angles, slots, entries, state.states, state.first, s.row, s.count,
            s.slot, drafts, kept, pending, n,
        )  # fmt: skip
        self._held.append((kv, gate, w, angles, slots, entries, state, sequences, pending))

    def commit_compressed(
        self,
        w: CompressorParameters,
        state: StateLayer,
        slot: torch.Tensor,
        first: torch.Tensor,
        accepted: torch.Tensor,
        pending: torch.Tensor,
    ) -> None:
        """Advances `compress`'s states in these slots by the first accepted[i] drafts, whose records start at first[i].
        slot, first, accepted: int32 [sequences], distinct slots; pending: the records that `compress` wrote."""
        self._native.commit_compressed(
            w.bias, len(w.norm), state.states, state.first, slot, first, accepted, pending
        )
        self._held.append((w, state, slot, first, accepted, pending))

    def choose_entries(
        self, plan: _C.CompressedPlan, q: torch.Tensor, weights: torch.Tensor, layer: KvLayer, heads: int
    ) -> None:
        """Chooses entries by the stored index keys, for each of the plan's rows with more entries than the plan lets
        it choose. q [n, heads * dim], rotated; weights [n, heads]."""
        assert layer.index_keys is not None
        self._native.choose_entries(plan, q, weights, layer.index_keys, heads)
        self._held.append((plan, q, weights, layer))

    def keep_keys(self, plan: _C.CompressedPlan, layer: KvLayer) -> None:
        """Copies keys of the step to their sequences' rings if these had no room for them before. Call it after
        attention."""
        self._native.keep_keys(plan, layer.keys)
        self._held.append((plan, layer))

    def rotate_back(self, x: Activations, n: int, heads: int, dim: int, angles: RowAngles) -> None:
        """Rotates attention's output back, in place, then writes the int8 form where x has one. x: [n * any, heads *
        dim / any]."""
        self._native.rotate_back(x.native, n, heads, dim, *angles)
        self._held.append((x, angles))

"""The operations of `CpuStream` on recurrent states."""

from __future__ import annotations

import torch

from moeserve.kernels import _C
from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.mamba2.heads import Mamba2Heads
from moeserve.kernels.operation_queue import OperationQueue
from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.kernels.stream_operands import (
    Activations,
    DeltaParameters,
    Mamba2Parameters,
    StateLayer,
    StateSequences,
)


class RecurrentOperations(OperationQueue):
    """Operations for `CpuStream`, whose docstring gives the rules for arguments and errors."""

    def delta_net(
        self,
        qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor | None,
        w: DeltaParameters,
        eps: float,
        heads: DeltaHeads,
        state: StateLayer,
        sequences: StateSequences,
        n: int,
        out: Activations,
        pending: torch.Tensor | None = None,
    ) -> None:
        """Computes the gated DeltaNet for the sequences' rows and advances their states. out: [n, value_width].
        pending: float32 [records, pending_values(heads)], needed if rows have drafts: see `commit_states`.

        qkv [n, channels] or three tensors [n, width], z [n, value_width], b [n, value_heads] and a [n, decays] are
        products of the layer's input; if a is None, b [n, key_heads, 2, value_heads / key_heads] holds both. qkv, b
        and a are overwritten. A token's result does not depend on how its sequence is divided into steps. eps: added
        to the mean square under the norm's root."""
        s = sequences
        q, k, v = qkv if isinstance(qkv, tuple) else (qkv, None, None)
        drafts, kept = (None, None) if s.drafts is None else (s.drafts.drafts, s.drafts.first)
        self._native.delta_net(
            q, k, v, z, b, a, w.conv, w.rate, w.dt_bias, w.norm, eps, _heads(heads), state.states, state.first, s.row,
            s.count, s.slot, drafts, kept, pending, n, out.native,
        )  # fmt: skip
        self._held.append((qkv, z, b, a, w, state, sequences, pending, out))

    def mamba2(
        self,
        projected: torch.Tensor,
        decays: torch.Tensor,
        w: Mamba2Parameters,
        eps: float,
        heads: Mamba2Heads,
        state: StateLayer,
        sequences: StateSequences,
        n: int,
        out: Activations,
        pending: torch.Tensor | None = None,
    ) -> None:
        """Computes the Mamba-2 recurrence for the sequences' rows and advances their states: mamba2/reference.py.
        out: [n, value_width]; pending: as for `delta_net`.

        projected [n, row_width]: z, x, B, C and dt, overwritten. decays [n, num_heads]: a workspace. A token's result
        does not depend on how its sequence is divided into steps. eps: added to the mean square under the norm's
        root."""
        s = sequences
        drafts, kept = (None, None) if s.drafts is None else (s.drafts.drafts, s.drafts.first)
        self._native.mamba2(
            projected, decays, w.conv, w.conv_bias, w.rate, w.dt_bias, w.skip, w.norm, eps, _heads(heads),
            state.states, state.first, s.row, s.count, s.slot, drafts, kept, pending, n, out.native,
        )  # fmt: skip
        self._held.append((projected, decays, w, state, sequences, pending, out))

    def short_conv(
        self,
        projected: torch.Tensor,
        conv: torch.Tensor,
        state: StateLayer,
        sequences: StateSequences,
        n: int,
        out: Activations,
        pending: torch.Tensor | None = None,
    ) -> None:
        """Computes the gated short convolution of the sequences' rows and advances their states:
        short_conv/reference.py. out: [n, channels]; pending: as for `delta_net`.

        projected [n, 3 * channels]: b, c and x, which is overwritten. conv: float32 [conv_kernel, channels], the weight
        of the oldest token first. A token's result does not depend on how its sequence is divided into steps.
        """
        s = sequences
        drafts, kept = (None, None) if s.drafts is None else (s.drafts.drafts, s.drafts.first)
        self._native.short_conv(
            projected,
            conv,
            state.states,
            state.first,
            s.row,
            s.count,
            s.slot,
            drafts,
            kept,
            pending,
            n,
            out.native,
        )
        self._held.append((projected, conv, state, sequences, pending, out))

    def commit_states(
        self,
        heads: DeltaHeads | Mamba2Heads | ShortConvHeads,
        state: StateLayer,
        slot: torch.Tensor,
        first: torch.Tensor,
        accepted: torch.Tensor,
        pending: torch.Tensor,
    ) -> None:
        """Advances the states in these slots by the first accepted[i] drafts, whose records start at first[i]; bitwise
        as their rows would have. slot, first, accepted: int32 [sequences], distinct slots; pending: the layer's
        records, which the step wrote."""
        columns = (slot, first, accepted, pending)
        if isinstance(heads, ShortConvHeads):
            self._native.commit_windows(state.states, state.first, heads.conv_kernel - 1, *columns)
        else:
            self._native.commit_states(_heads(heads), state.states, state.first, *columns)
        self._held.append((state, slot, first, accepted, pending))

    def copy_states(self, states: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copies slots in order, for each (source, target) pair: slot target = slot source, or zeros for source -1.

        states: float32 [slots, values]; pairs: int32 [count, 2].
        """
        self._native.copy_states(states, pairs)
        self._held.append((states, pairs))


def _heads(heads: DeltaHeads | Mamba2Heads) -> _C.DeltaHeads:
    h = heads
    if isinstance(h, Mamba2Heads):
        sizes = (h.num_groups, h.num_heads, h.state_dim, h.head_dim, h.conv_kernel)
        return _C.DeltaHeads(*sizes, tiled=False, kimi=False, mamba2=True)
    return _C.DeltaHeads(
        h.key_heads,
        h.value_heads,
        h.key_dim,
        h.value_dim,
        h.conv_kernel,
        h.is_tiled,
        h.is_kimi,
        sigmoid=h.has_sigmoid_gate,
        bound=h.decay_bound,
    )

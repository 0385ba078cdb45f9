"""`CpuStream`'s operations on a residual of several streams (hyper-connections), and on n-gram embeddings, which are
added to it.

A row contains `streams` vectors of `hidden` numbers, one after another. streams/reference.py, streams/sinkhorn.py,
streams/attended.py and ngrams/reference.py specify the results. The rules for operands are `CpuStream`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moeserve.kernels.operation_queue import OperationQueue
from moeserve.kernels.stream_operands import Activations, StateLayer, StateSequences
from moeserve.kernels.streams.sinkhorn import SinkhornMix


class NgramNorms(NamedTuple):
    """Weights of the RMS norms applied to each stream: float32 [streams * hidden]."""

    query: torch.Tensor  # for the residual
    key: torch.Tensor
    conv: torch.Tensor  # for the convolution's input


class ResidualOperations(OperationQueue):
    def stream_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        n: int,
        y: Activations,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Computes y[i] = RMSNorm of each stream of x[rows[i]], times weight [streams, hidden]; also quantised if y
        has the int8 form. rows: int32 [n] or None (all). eps: added to the mean square under the norm's root."""
        self._native.stream_norm(x, weight, eps, n, y.native, rows)
        self._held.append((x, weight, y, rows))

    def scaled_silu(self, x: torch.Tensor, factor: float, n: int, out: Activations) -> None:
        """Computes out[t] = silu(x[t] * factor), also quantised if `out` has the int8 form. x is overwritten."""
        self._native.scaled_silu(x, factor, n, out.native)
        self._held.append((x, out))

    def mix_streams(self, gate: torch.Tensor, x: Activations, n: int, out: Activations) -> None:
        """Computes out[t] = mean over the streams of sigmoid(gate[t, s]) * x[t, s]. gate, x: [n, streams * hidden];
        out: [n, hidden]."""
        self._native.mix_streams(gate, x.native, n, out.native)
        self._held.append((gate, x, out))

    def inject(self, block: torch.Tensor, weights: torch.Tensor, n: int, x: torch.Tensor) -> None:
        """Computes x[t, s] += 2 * sigmoid(weights[t, s] / streams) * block[t]. block: [n, hidden]; weights: [n,
        streams]; x: [n, streams * hidden]."""
        self._native.inject(block, weights, n, x)
        self._held.append((block, weights, x))

    def read_streams(
        self,
        products: torch.Tensor | None,
        x: torch.Tensor,
        rows: torch.Tensor | None,
        mix: SinkhornMix | None,
        norm: torch.Tensor,
        norm_eps: float,
        n: int,
        y: Activations,
        weights: torch.Tensor | None,
    ) -> None:
        """Computes y[i] = RMSNorm(a weighted sum of x[rows[i]]'s streams) * norm, as streams/sinkhorn.py specifies,
        quantised too where y has room. products: float32 [n, streams * (2 + streams)]; weights: [n, streams * (1 +
        streams)], to which go the weights of the block's output and the mix. Before the head weights is None, and
        products [n, streams]; products and mix None: the mean of the streams is read."""
        self._native.read_streams(
            products,
            x,
            rows,
            None if mix is None else mix.base,
            None if mix is None else mix.scale,
            0.0 if mix is None else mix.eps,
            0 if mix is None else mix.iterations,
            norm,
            norm_eps,
            n,
            y.native,
            weights,
        )
        self._held.append((products, x, rows, mix, norm, y, weights))

    def add_streams(self, block: torch.Tensor, weights: torch.Tensor, n: int, x: torch.Tensor) -> None:
        """Mixes x's streams and adds block [n, hidden] to each, with `read_streams`'s weights."""
        self._native.add_streams(block, weights, n, x)
        self._held.append((block, weights, x))

    def attend_streams(
        self,
        x: torch.Tensor,
        rows: torch.Tensor | None,
        score: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        num: int,
        n: int,
        y: Activations,
    ) -> None:
        """Computes y[i] = RMSNorm(the sum of x[rows[i]]'s first `num` streams, weighted as streams/attended.py
        specifies) * norm, quantised too where y has room. rows: int32 [n] or None (all); score, norm: float32
        [hidden]. eps: added to the mean square under the norm's root."""
        self._native.attend_streams(x, rows, score, norm, eps, num, n, y.native)
        self._held.append((x, rows, score, norm, y))

    def put_stream(self, block: torch.Tensor, stream: int, n: int, x: torch.Tensor, *, add: bool) -> None:
        """Computes x[t, stream] = block[t], or with `add` x[t, stream] += block[t]. block: [n, hidden]; x: [n, streams
        * hidden]."""
        self._native.put_stream(block, stream, add, n, x)
        self._held.append((block, x))

    def ngram_gate(
        self,
        x: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        norms: NgramNorms,
        eps: float,
        n: int,
        factors: torch.Tensor,
    ) -> None:
        """Computes the gate of each stream for a token's n-gram value, factors [n, streams], and overwrites key with
        the convolution's input. x, key: [n, streams * hidden]; value: [n, hidden]. eps: added to the mean square under
        the norm's root."""
        self._native.ngram_gate(x, key, value, norms.query, norms.key, norms.conv, eps, n, factors)
        self._held.append((x, key, value, norms, factors))

    def ngram_conv(
        self,
        inputs: torch.Tensor,
        factors: torch.Tensor,
        value: torch.Tensor,
        conv: torch.Tensor,
        dilation: int,
        state: StateLayer,
        sequences: StateSequences,
        n: int,
        x: torch.Tensor,
        pending: torch.Tensor | None = None,
    ) -> None:
        """Computes x[t, s] += factors[t, s] * value[t] + silu(conv(inputs)[t, s]), and advances the states, which are
        the last (taps - 1) * dilation inputs of each sequence. inputs: `ngram_gate`'s key. conv: [taps, streams *
        hidden], the weight of the oldest input first; taps are `dilation` tokens apart. pending: float32 [records,
        streams * hidden], needed if rows have drafts: see `commit_ngrams`."""
        s = sequences
        drafts, kept = (None, None) if s.drafts is None else (s.drafts.drafts, s.drafts.first)
        self._native.ngram_conv(
            inputs, factors, value, conv, dilation, state.states, state.first, s.row, s.count, s.slot, drafts, kept,
            pending, n, x,
        )  # fmt: skip
        self._held.append((inputs, factors, value, conv, state, sequences, pending, x))

    def commit_ngrams(
        self,
        state: StateLayer,
        kept_rows: int,
        slot: torch.Tensor,
        first: torch.Tensor,
        accepted: torch.Tensor,
        pending: torch.Tensor,
    ) -> None:
        """Advances `ngram_conv`'s states in these slots by the first accepted[i] drafts, whose inputs start at
        pending[first[i]]. kept_rows: number of inputs in a state. slot, first, accepted: int32 [sequences], distinct
        slots."""
        self._native.commit_windows(state.states, state.first, kept_rows, slot, first, accepted, pending)
        self._held.append((state, slot, first, accepted, pending))

"""An EAGLE-3 head, which makes drafts (models/eagle3/shape.py). It has a step's buffers and KV of its own, and runs
between two steps of the model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.cpu_stream import CpuStream, LinearGroup
from moeserve.kernels.stream_operands import Activations, KvLayer
from moeserve.models.blocks.cpu.attention import store_kv
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.cpu.draft_scores import Int32s, likeliest
from moeserve.models.blocks.cpu.forms import angles_of, forms_of
from moeserve.models.blocks.cpu.layers import CpuLayers
from moeserve.models.blocks.cpu.next_token import NextTokenRows, Predicted
from moeserve.models.blocks.cpu.residual import norm
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.cpu_step_buffers import CPU_LOGIT_ROWS
from moeserve.models.eagle3.shape import DraftHeadShape
from moeserve.models.loading.cpu_draft_head import CpuDraftHead
from moeserve.models.loading.cpu_weights import CpuAttention, CpuWeights


class CpuDraftHeadBlock:
    """An EAGLE-3 head on the CPU pool, as a `DraftingBlock`."""

    def __init__(
        self,
        head: DraftHeadShape,
        weights: CpuDraftHead,
        stream: CpuStream,
        kv: KvLayer,
        model: CpuDecoder,
        model_weights: CpuWeights,
        max_tokens: int,
        max_model_len: int,
    ) -> None:
        """kv: the head's KV cache, with the same slots as the model's. model: a decoder that was created with the
        head's taps. max_tokens: rows of the largest step."""
        own, hidden = head.own, head.own.hidden_size
        self._head, self._w, self._stream, self._kv, self._model = head, weights, stream, kv, model
        self._space = CpuWorkspace(own, weights.own, max_tokens, CPU_LOGIT_ROWS, pinned=False)
        forms = forms_of(own, self._space, angles_of(own, max_model_len, weights.own.rope_factors))
        self._form = forms[head.attention.form]
        self._layers = CpuLayers(own, weights.own, stream, [kv], (), self._space, forms, None, None, 0)
        assert model_weights.head is not None
        self._embedding = weights.embedding or model_weights.embedding
        # A head without a matrix of its own scores by the model's.
        self._scale = 1.0 if weights.embedding is not None else model.shape.embedding_scale
        self._output = weights.output or model_weights.head.matrix
        self._product = LinearGroup([self._output])
        self._tapped = Activations(max_tokens, len(head.taps) * head.target_size)
        self._token, self._state = Activations(max_tokens, hidden), Activations(max_tokens, hidden)
        self._states = torch.empty(max_tokens, hidden)
        self.bytes_read = 0  # weights, read by all calls

    @property
    def hidden_size(self) -> int:
        return self._head.own.hidden_size

    @property
    def vocab_size(self) -> int:
        return self._head.own.vocab_size

    @property
    def frequent_tokens(self) -> int | None:
        """Returns the number of tokens that every shortlist contains: all, if the head numbers its tokens differently
        from the model; None: the usual part of the vocabulary."""
        return -(-self.vocab_size // PANEL_ROWS) * PANEL_ROWS if self._head.has_ids else None

    @property
    def most_rows(self) -> int:
        """Largest number of rows per call."""
        return len(self._states)

    def wait(self) -> None:
        """Waits until the large model's last step has been computed."""
        self._stream.wait()

    def model_rows(self, n: int) -> Tensor:
        """Returns the model's residuals before the taps for the first n rows of the last step, which must have ended
        (`wait`): float32 [n, taps * hidden]."""
        return torch.cat([self._model.taps[layer].f32[:n] for layer in self._head.taps], dim=1)

    def model_states(self, rows: Tensor) -> Tensor:
        """Returns the states that the head makes of `model_rows`: float32 [n, hidden]. A view that the next call
        overwrites."""
        n, w = len(rows), self._w
        if w.joined_norm is None:
            self._stream.gelu_gate(None, rows, 0, n, self._tapped)  # without a gate a copy, quantised
        else:
            norm(self._stream, w.joined_norm, self._head.own.rms_eps, n, rows, self._tapped)
        self._stream.linear(self._tapped, n, self._w.joined, [self._states])
        self._stream.wait()
        return self._states[:n]

    def store(self, rows: NextTokenRows) -> None:
        """Computes and stores only the keys and values of these rows."""
        form, n = self._form, len(rows.token_ids)
        self._norm_inputs(rows)
        self._stream.linear(self._token, n, self._w.token_k_v, [form.k, form.v])
        self._stream.linear(self._state, n, self._w.state_k_v, [form.k, form.v], add=True)
        w = self._w.own.layers[0].mixer
        assert isinstance(w, CpuAttention)
        own = self._head.own
        store_kv(self._stream, w, self._head.attention, form, own.rms_eps, self._kv, _batch_of(rows))
        self._stream.wait()

    def clear(self, kv_slots: Int32s) -> None:
        """Zeroes the keys and values of these KV slots."""
        places = torch.from_numpy(kv_slots.astype(np.int64))
        for tensor in self._kv.tensors:
            tensor.index_fill_(0, places, 0)

    def predict(
        self, rows: NextTokenRows, req_slots: Int32s, slot_table: Int32s, panels: Int32s | None = None
    ) -> Predicted:
        """Computes one row for each of these requests, as `CpuNextTokenBlock.predict` does."""
        n, form, attention = len(rows.token_ids), self._form, self._head.attention
        each, counts = np.arange(n, dtype=np.int32), np.ones(n, np.int32)
        build_attention_plan(
            *(form.plans[attention.rule], each, counts, rows.positions, req_slots, slot_table, form.heads),
            self._stream.threads,
            rule=attention.rule,
        )
        self._norm_inputs(rows)
        qkv = [form.q, form.k, form.v]
        w = self._w.own.layers[0].mixer
        assert isinstance(w, CpuAttention)
        self._stream.linear(self._token, n, w.qkv, qkv)
        self._stream.linear(self._state, n, self._w.from_state, qkv, add=True)
        self._stream.wait()  # x is free now, and the norm is there
        residual = self._state.f32[:n] if self._head.norm_before_residual else rows.states
        self._space.x[:n].copy_(residual)
        batch = _batch_of(rows)
        self._layers.mix_tokens(0, batch)
        self._layers.feed_forward(0, batch)
        scored = likeliest(
            *(self._stream, self._space, self._w.output_norm, self._head.own.rms_eps, n),
            *(self._output, self._product, panels),
        )
        self.bytes_read += self._w.dense_bytes + scored.bytes_read
        ids = scored.token_ids if self._w.ids is None else self._w.ids[scored.token_ids]
        states = self._space.x[:n]
        if self._head.norm_output:
            norm(self._stream, self._w.output_norm, self._head.own.rms_eps, n, self._space.x, self._state)
            self._stream.wait()
            states = self._state.f32[:n]
        return Predicted(ids, scored.probabilities, states)

    def _norm_inputs(self, rows: NextTokenRows) -> None:
        """Launches the norms of the tokens' embeddings and of the states."""
        stream, w, n, eps = self._stream, self._w, len(rows.token_ids), self._head.own.rms_eps
        table, ids, x = self._embedding, torch.from_numpy(rows.token_ids), self._space.x
        stream.embed(table.table, table.ggml_type, ids, n, x, scale=self._scale)
        norm(stream, w.token_norm, eps, n, x, self._token)
        norm(stream, w.state_norm, eps, n, rows.states, self._state)


def _batch_of(rows: NextTokenRows) -> CpuBatch:
    """The head rotates by the tokens' numbers, at pictures, too."""
    return CpuBatch(len(rows.token_ids), torch.from_numpy(rows.positions), torch.from_numpy(rows.kv_slots))

"""The model's next-token block, which makes drafts (models/next_token.py). It uses the decoder's buffers.

It runs between two steps. Until `store` or `predict` is called, `x` still holds the last step's rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.attention import AttentionShape
from moeserve.models.blocks.cpu.attention import store_kv
from moeserve.models.blocks.cpu.draft_scores import likeliest
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.latent import store_latent
from moeserve.models.blocks.cpu.layers import CpuLayers
from moeserve.models.blocks.cpu.residual import norm, read_residual
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.indexer import ChoosesKeys
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.loading.cpu_weights import CpuAttention, CpuLatentAttention, CpuWeights

Int32s = npt.NDArray[np.int32]


class NextTokenRows(NamedTuple):
    """Rows of the next-token block, with fields of [n]. Row q of a request has token q and the hidden state at position
    q - 1."""

    token_ids: Int32s
    states: Tensor  # float32 [n, hidden], as `model_states` returns them
    positions: Int32s  # q - 1
    kv_slots: Int32s  # of position q
    # RoPE positions at q - 1, where pictures make them others: int32 [n], or [3, n] by section. None: `positions`
    rotary: Int32s | None = None


class Predicted(NamedTuple):
    token_ids: Int32s  # [n]: the most likely tokens
    probabilities: npt.NDArray[np.float32]  # [n]: their probabilities
    states: Tensor  # float32 [n, hidden]: input of the next row


class CpuNextTokenBlock:
    def __init__(
        self,
        shape: ModelShape,
        weights: CpuWeights,
        stream: CpuStream,
        kv: KvLayer,
        space: CpuWorkspace,
        form: CpuForm,
        layers: CpuLayers,
    ) -> None:
        """space, layers: the decoder's buffers and layers. form: the result of `next_token_form`."""
        assert weights.next_token is not None
        assert weights.head is not None
        assert space.next_token is not None
        attention = shape.loaded_layers[-1].attention
        assert attention is not None
        self._shape = shape
        self._embedding = weights.embedding
        self._w = weights.next_token
        self._head = weights.head
        self._stream = stream
        self._kv = kv
        self._model_x = space.x
        self._space = space.of_one_stream()
        self._own = space.next_token
        self._form = form
        self._layers = layers.on(self._space, {attention.form: form})
        self.bytes_read = 0  # weights outside the routed experts, read by all calls

    @property
    def hidden_size(self) -> int:
        return self._shape.hidden_size

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    @property
    def frequent_tokens(self) -> int | None:
        """The number of tokens that every shortlist contains; None: the usual part of the vocabulary."""
        return None

    @property
    def most_rows(self) -> int:
        """Largest number of rows per call."""
        return len(self._model_x)

    def wait(self) -> None:
        """Waits for the model's last step."""
        self._stream.wait()

    def model_rows(self, n: int) -> Tensor:
        """Returns a copy of the model's output for the first n rows of the last step, which must have ended (`wait`):
        float32 [n, residual width], before the output norm."""
        return self._model_x[:n].clone()

    def model_states(self, rows: Tensor) -> Tensor:
        """Returns the model's hidden states in the form that the drafting block reads, float32 [n, hidden], for rows
        [n, hidden] of at most a step. The result is a view that the next call overwrites."""
        if self._shape.drafts_before_norm:
            return rows
        n = len(rows)
        norm(self._stream, self._w.model_norm, self._shape.rms_eps, n, rows, self._own.states)
        self._stream.wait()
        return self._own.states.f32[:n]

    def store(self, rows: NextTokenRows) -> None:
        """Computes and stores only the keys and values of these rows."""
        stream, space, form, n = self._stream, self._space, self._form, len(rows.token_ids)
        w, mixer, eps = self._w.layer.mixer, self._shape.loaded_layers[-1].mixer, self._shape.rms_eps
        assert isinstance(w, CpuAttention | CpuLatentAttention)
        self._join_inputs(rows)
        read_residual(stream, w.norm, eps, n, space)
        batch = _batch_of(rows)
        if isinstance(w, CpuAttention):
            assert isinstance(mixer, AttentionShape)
            stream.linear(space.y, n, self._w.k_v, [form.k, form.v])
            store_kv(stream, w, mixer, form, eps, self._kv, batch)
        else:
            assert isinstance(mixer, LatentAttentionShape)
            assert space.latent is not None
            stream.linear(space.y, n, self._w.k_v, [space.latent.latent])
            if w.indexer is not None and space.indexer is not None:
                stream.linear(space.y, n, w.indexer.inputs, [space.indexer.keys, space.indexer.weights])
            store_latent(stream, w, mixer, form, self._kv, batch, space)
        stream.wait()

    def clear(self, kv_slots: Int32s) -> None:
        """Zeroes the keys and values of these KV slots."""
        places = torch.from_numpy(kv_slots.astype(np.int64))
        for tensor in self._kv.tensors:
            tensor.index_fill_(0, places, 0)

    def predict(
        self, rows: NextTokenRows, req_slots: Int32s, slot_table: Int32s, panels: Int32s | None = None
    ) -> Predicted:
        """Computes one row for each of these requests; the keys and values of earlier rows must have been stored.
        slot_table: int32 [request slots, positions], C order: the KV slot of row q at index q - 1. panels: int32, the
        panels of the head's rows to score; None: all."""
        n = len(rows.token_ids)
        form, each = self._form, np.arange(n, dtype=np.int32)
        counts, attention = np.ones(n, np.int32), self._shape.loaded_layers[-1].attention
        assert isinstance(attention, ChoosesKeys)
        build_attention_plan(
            *(
                form.plans[attention.rule],
                each,
                counts,
                rows.positions,
                req_slots,
                slot_table,
                form.heads,
                self._stream.threads,
            ),
            rule=attention.rule,
        )
        self._join_inputs(rows)
        self._layers.forward(self._shape.num_layers, _batch_of(rows))
        if not self._shape.drafts_before_norm:
            norm(self._stream, self._w.own_norm, self._shape.rms_eps, n, self._space.x, self._own.states)
        eps, head = self._shape.rms_eps, self._head
        scored = likeliest(
            *(self._stream, self._space, self._w.head_norm, eps, n, head.matrix, head.output, panels),
            softcap=self._shape.logit_softcap,
        )
        if self._shape.drafts_before_norm:  # `likeliest` has waited for x
            self._own.states.f32[:n].copy_(self._space.x[:n])
        self.bytes_read += self._w.dense_bytes + scored.bytes_read
        return Predicted(scored.token_ids, scored.probabilities, self._own.states.f32[:n])

    def _join_inputs(self, rows: NextTokenRows) -> None:
        """Launches x = eh_proj [enorm(embedding), hnorm(state)], as two products with half the columns each."""
        stream, space, own, w, n = self._stream, self._space, self._own, self._w, len(rows.token_ids)
        table, eps = self._embedding, self._shape.rms_eps
        ids, scale = torch.from_numpy(rows.token_ids), self._shape.embedding_scale
        norm(stream, w.state_norm, eps, n, rows.states, own.state)
        stream.embed(table.table, table.ggml_type, ids, n, space.x, scale=scale)
        norm(stream, w.token_norm, eps, n, space.x, own.token)
        stream.linear(own.token, n, w.from_token, [space.x])
        stream.linear(own.state, n, w.from_state, [space.x], add=True)


def _batch_of(rows: NextTokenRows) -> CpuBatch:
    positions = rows.positions if rows.rotary is None else rows.rotary
    return CpuBatch(len(rows.token_ids), torch.from_numpy(positions), torch.from_numpy(rows.kv_slots))

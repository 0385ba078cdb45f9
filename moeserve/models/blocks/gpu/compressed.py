"""Compressed attention on a GPU, as launches on the current stream: output_b(output_a(rotate_back(attention(q, keys
and entries)))) of y; the same network as blocks/cpu/compressed.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moeserve.kernels.choice_rule import stride_of_choice
from moeserve.kernels.compressed.op import (
    WindowKeys,
    compress,
    compressed_attention,
    compressed_store,
    keep_keys,
)
from moeserve.kernels.compressed_operations import RowAngles
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.indexer.op import choose, rows_together, score_keys
from moeserve.kernels.latent.op import linear_by_head, norm_rows
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.models.blocks.gpu.compressed_workspace import CompressedWorkspace, EntryChoice
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.linear import multiply, multiply_all
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.compressed_buffers import index_rule
from moeserve.models.latent import AttentionForm
from moeserve.models.loading.gpu_weights import GpuCompressedAttention, plane_tensors


class GpuCompressedAttentionBlock:
    """The compressed attention of all layers. slot_table: int32 [requests, length], the KV slot of each position of a
    request."""

    def __init__(
        self,
        eps: float,
        slot_table: Tensor,
        forms: Mapping[AttentionForm, GpuForm],
        shapes: Sequence[object],
        kv: Sequence[KvLayer],
    ) -> None:
        """shapes: the shapes of the layers' mixers; kv: the KV cache of each layer."""
        self._eps = eps
        self._slot_table = slot_table
        self._forms = forms
        self._keys = [
            WindowKeys.of(layer, shape.window) if isinstance(shape, CompressedAttentionShape) else None
            for shape, layer in zip(shapes, kv, strict=False)
        ]

    def attend(
        self,
        index: int,
        shape: CompressedAttentionShape,
        w: GpuCompressedAttention,
        kv: KvLayer,
        state: StateLayer,
        batch: GpuBatch,
        s: GpuWorkspace,
    ) -> None:
        """Launches a layer's attention. Reads s.y, the norm of x; writes the block's output to s.output. index: of the
        layer, from 0."""
        count, space, form, keys = batch.count, s.compressed, self._forms[shape.form], self._keys[index]
        assert space is not None
        assert keys is not None
        assert batch.states is not None
        sequences, angles = batch.states.sequences, RowAngles(form.cos, form.sin, batch.positions)
        widths = [width for _, width in shape.input_parts]
        q_a, of_token, *products = multiply_all(w.inputs, widths, s.y, count, s.projected, s.dense)
        norm_rows(q_a, w.q_a_norm, self._eps, count, space.q_a.x, space.q_a.codes, space.q_a.scales)
        choice = None if shape.indexer is None else space.choice
        of_q = [shape.q_width] if shape.indexer is None else [shape.q_width, shape.indexer.q_width]
        q, *index_q = multiply_all(w.q_b, of_q, space.q_a, count, space.q, s.dense)
        compressed_store(
            q, of_token, w.kv_norm, self._eps, shape.scale, angles, sequences, keys, count, space.queries,
            index_q[0] if index_q else None, None if choice is None else choice.queries,
        )  # fmt: skip
        self._compress(shape, w, products, angles, sequences, kv, state, batch)
        if choice is not None:
            self._choose(shape, products[-1], kv, batch, s.rows, choice)
        compressed_attention(
            space.queries, keys, w.sinks, angles, sequences, self._slot_table, batch.req_slots, shape.ratio,
            None if choice is None else choice.chosen, shape.chosen, count, space.attended,
        )  # fmt: skip
        if not batch.rows_independent and s.rows > keys.most_fitting:
            keep_keys(keys, batch.positions, sequences)
        _output(shape, w, count, space, s)

    def _compress(
        self,
        shape: CompressedAttentionShape,
        w: GpuCompressedAttention,
        products: Sequence[Tensor],
        angles: RowAngles,
        sequences: StepSequences,
        kv: KvLayer,
        state: StateLayer,
        batch: GpuBatch,
    ) -> None:
        at, targets = state.first, (kv.keys, kv.index_keys)
        for i, (compressor, parameters) in enumerate(zip(shape.compressors, w.compressors, strict=True)):
            entries = targets[i]
            assert entries is not None
            compress(
                products[2 * i], products[2 * i + 1], parameters, self._eps, angles, sequences, state.states[:, at:],
                batch.kv_slots, batch.count, entries,
            )  # fmt: skip
            at += compressor.state_values

    def _choose(
        self,
        shape: CompressedAttentionShape,
        weights: Tensor,
        kv: KvLayer,
        batch: GpuBatch,
        rows: int,
        choice: EntryChoice,
    ) -> None:
        """Launches the choice of entries, in parts of as many rows as the buffer of scores holds."""
        assert kv.index_keys is not None
        table, rule, count = self._slot_table, index_rule(shape), batch.count
        together = rows_together(choice.scores, rows, stride_of_choice(table.stride(0), rule))
        for first in range(0, rows, together):
            n = min(together, rows - first)
            some = (table, batch.req_slots, batch.positions, count, choice.row_numbers[first:], n, rule)
            are_prompts = batch.tiles is not None
            score_keys(choice.queries, weights, kv.index_keys, *some, choice.scores, are_prompts=are_prompts)
            choose(choice.scores, *some, choice.chosen, choice.lasts)


def _output(
    shape: CompressedAttentionShape,
    w: GpuCompressedAttention,
    count: Tensor,
    space: CompressedWorkspace,
    s: GpuWorkspace,
) -> None:
    """Launches both of the output's matrices, the first by groups of heads."""
    a, groups = space.output, shape.output_groups
    assert a.x is not None
    linear_by_head(
        space.attended.view(s.rows * groups, -1), plane_tensors(w.output_a), int(w.output_a.type), w.output_a.cols,
        space.by_group, count, a.x,
    )  # fmt: skip
    if a.codes is not None:
        norm_rows(a.x, None, 0.0, count, None, a.codes, a.scales, parts=groups)
    multiply(w.output, a, count, s.output.view(s.rows, -1), s.dense)

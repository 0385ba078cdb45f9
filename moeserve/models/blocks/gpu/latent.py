"""Computes output(values(attention(queries, latents))) of y with latent attention in absorbed form, as launches on the
current stream; the same network as blocks/cpu/latent.py."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moeserve.kernels.delta_net.op import sigmoid_gate
from moeserve.kernels.latent.op import (
    attend_chosen,
    decode_latent,
    latent_store,
    linear_by_head,
    norm_rows,
    prefill_latent,
)
from moeserve.kernels.planes import Planes
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.indexer import choose_keys
from moeserve.models.blocks.gpu.latent_workspace import IndexerWorkspace, LatentWorkspace
from moeserve.models.blocks.gpu.linear import multiply, multiply_all
from moeserve.models.blocks.gpu.workspace import (
    MAX_DECODE_ROWS,
    MIXED_DECODE_ROWS,
    AttentionWorkspace,
    GpuBatch,
    GpuWorkspace,
)
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.loading.gpu_weights import GpuLatentAttention, plane_tensors


class GpuLatentAttentionBlock:
    """The latent attention of all layers. Arguments as for `GpuAttentionBlock`."""

    def __init__(self, slot_table: Tensor, forms: Mapping[AttentionForm, GpuForm]) -> None:
        self._slot_table = slot_table
        self._forms = forms

    def attend(
        self,
        shape: LatentAttentionShape,
        w: GpuLatentAttention,
        kv: KvLayer,
        batch: GpuBatch,
        s: GpuWorkspace,
    ) -> None:
        """Launches a layer's attention. Reads s.y, the norm of x; writes the block's output to s.output."""
        count, space, of_form = batch.count, s.latent, s.forms[shape.form]
        a = of_form.attended
        assert space is not None
        assert a.x is not None
        gate = self.store(shape, w, kv, batch, s)
        if w.indexer is not None:
            assert shape.indexer is not None
            assert s.indexer is not None
            assert space.q_a is not None
            form = self._forms[shape.form]
            choose_keys(shape.indexer, w.indexer, form, kv, self._slot_table, batch, space.q_a, s, s.indexer)
        _by_head(space.nope, w.k_b, count, space, space.queries)
        if shape.indexer is None:
            self._attend(kv, batch, of_form, space)
        else:
            assert s.indexer is not None
            _attend_chosen(kv, batch, of_form, space, s.indexer)
        _by_head(space.attended, w.v_b, count, space, a.x)
        if gate is not None:
            sigmoid_gate(a.x, gate, shape.value_dim, count, a.codes, a.scales)
        elif a.codes is not None:
            norm_rows(a.x, None, 0.0, count, None, a.codes, a.scales, parts=shape.num_heads)
        multiply(w.output, a, count, s.output.view(s.rows, -1), s.dense)

    def store(
        self,
        shape: LatentAttentionShape,
        w: GpuLatentAttention,
        kv: KvLayer,
        batch: GpuBatch,
        s: GpuWorkspace,
    ) -> Tensor | None:
        """Launches the computation of a layer's queries, and of its latents, which are stored in the KV cache. Reads
        s.y, the norm of x. Returns the gates [rows, gate_width]; None if there are none."""
        count, space, form = batch.count, s.latent, self._forms[shape.form]
        assert space is not None
        widths = [width for _, width in shape.input_parts]
        q, latent, *gates = multiply_all(w.inputs, widths, s.y, count, s.projected, s.dense)
        if w.q_b is not None:
            assert space.q_a is not None
            norm_rows(q, w.q_a_norm, shape.latent_eps, count, space.q_a.x, space.q_a.codes, space.q_a.scales)
            q = space.q
            multiply(w.q_b, space.q_a, count, q, s.dense)
        latent_store(
            q, latent, w.latent_norm, shape.latent_eps, form.cos, form.sin, batch.positions, batch.kv_slots,
            count, shape.scale, space.nope, space.rotated, kv.keys,
        )  # fmt: skip
        return gates[0] if gates else None

    def _attend(
        self, kv: KvLayer, batch: GpuBatch, of_form: AttentionWorkspace, space: LatentWorkspace
    ) -> None:
        together, workspace = (
            (MAX_DECODE_ROWS, of_form.decode)
            if batch.tiles is None
            else (MIXED_DECODE_ROWS, of_form.mixed_decode)
        )
        for first in range(0, batch.num_decode, together):
            part = slice(first, min(first + together, batch.num_decode))
            count = batch.count if batch.decode_counts is None else batch.decode_counts[first // together]
            decode_latent(
                space.queries[part], space.rotated[part], kv.keys, self._slot_table, batch.req_slots[part],
                batch.positions[part], count, workspace, space.attended[part],
            )  # fmt: skip
        if batch.tiles is not None:
            (tiles,) = batch.tiles  # all layers have one form
            prefill_latent(space.queries, space.rotated, kv.keys, self._slot_table, tiles, space.attended)


def _attend_chosen(
    kv: KvLayer,
    batch: GpuBatch,
    of_form: AttentionWorkspace,
    space: LatentWorkspace,
    indexer: IndexerWorkspace,
) -> None:
    """Attends to the keys that this layer or an earlier one has chosen. Each row is treated as a request whose KV
    slots are the chosen ones, so prompt rows need no kernel of their own. They need no splits either: a prompt has
    enough rows to fill a GPU."""
    chosen = indexer.chosen[:, 0]
    if batch.tiles is not None:
        attend_chosen(
            space.queries, space.rotated, kv.keys, chosen, indexer.row_numbers, indexer.lasts, batch.count,
            space.attended,
        )  # fmt: skip
        return
    for first in range(0, batch.num_decode, MAX_DECODE_ROWS):
        part = slice(first, min(first + MAX_DECODE_ROWS, batch.num_decode))
        decode_latent(
            space.queries[part], space.rotated[part], kv.keys, chosen, indexer.row_numbers[part], indexer.lasts[part],
            batch.count, of_form.decode, space.attended[part], chosen=chosen.shape[1],
        )  # fmt: skip


def _by_head(x: Tensor, planes: Planes, count: Tensor, space: LatentWorkspace, out: Tensor) -> None:
    linear_by_head(
        x.flatten(0, 1), plane_tensors(planes), int(planes.type), planes.cols, space.by_head, count, out
    )

"""Attention on a GPU, as launches on the current stream: output(attention(rope(q), rope(k), v)) with q, k, v =
qkv(y).

Gated attention multiplies its output by a function of gate(y). A layer without a v matrix uses k's product as v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.chosen_op import attend_blocks
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention, prefill_attention
from moeserve.kernels.delta_net.op import sigmoid_gate
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.adapters.products import QKV_PARTS
from moeserve.models.attention import AttentionShape
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.indexer import choose_blocks
from moeserve.models.blocks.gpu.linear import multiply, multiply_all
from moeserve.models.blocks.gpu.lora_products import LayerAdapters
from moeserve.models.blocks.gpu.workspace import (
    MAX_DECODE_ROWS,
    MIXED_DECODE_ROWS,
    AttentionWorkspace,
    GpuBatch,
    GpuWorkspace,
)
from moeserve.models.latent import AttentionForm
from moeserve.models.loading.gpu_weights import GpuAttention
from moeserve.models.sources.gguf import names


class GpuAttentionBlock:
    """The attention of all layers. slot_table: int32 [requests, length], the KV slot of each position of a request.
    window_table: the same for windowed layers; None: they have no separate slots. full_layers_see_ahead: see
    ModelShape."""

    def __init__(
        self,
        eps: float,
        slot_table: Tensor,
        forms: Mapping[AttentionForm, GpuForm],
        window_table: Tensor | None = None,
        *,
        full_layers_see_ahead: bool = False,
    ) -> None:
        self._eps = eps
        self._slot_table = slot_table
        self._window_table = window_table
        self._forms = forms
        self._full_layers_see_ahead = full_layers_see_ahead

    def attend(
        self,
        shape: AttentionShape,
        w: GpuAttention,
        kv: KvLayer,
        batch: GpuBatch,
        s: GpuWorkspace,
        adapters: LayerAdapters | None,
        joined: GpuActivations | None = None,
    ) -> None:
        """Launches a layer's attention. kv: the cache of the layer whose keys it attends to. Reads s.y, the norm of x;
        writes the block's output to s.output. joined: the input of q, k and v in place of s.y, [rows, any]."""
        eps, count, form, of_form = self._eps, batch.count, self._forms[shape.form], s.forms[shape.form]
        q, gate, k, v = _project(shape, w, count, s, joined)
        if adapters is not None:
            _add_adapters(adapters, shape, s.y, q, k, v)
        v_eps = eps if shape.has_v_norm else None
        table, slots = self._slot_table, batch.kv_slots
        if shape.window and self._window_table is not None:
            assert batch.window_slots is not None
            table, slots = self._window_table, batch.window_slots
        sections = form.sections_of(batch.rotary_positions)
        stores_within = batch.rows_independent and shape.qk_norm != "full" and shape.indexer is None
        if stores_within and k is not None and v is not None:
            new = NewTokens(
                k,
                v,
                w.q_norm,
                w.k_norm,
                eps,
                form.cos,
                form.sin,
                slots,
                v_eps,
                shape.norm_after,
                shape.v_scale,
                sections,
            )
            self._attend(shape, w, of_form, batch, kv, table, q, new)
        else:
            rope_store(
                q, k, v, w.q_norm, w.k_norm, eps, form.cos, form.sin, batch.positions, slots, count,
                of_form.q, kv.keys, kv.values, kv.key_scales, kv.value_scales, v_eps,
                norm_after=shape.norm_after, v_scale=shape.v_scale, sections=sections,
            )  # fmt: skip
            if shape.indexer is None:
                self._attend(shape, w, of_form, batch, kv, table, of_form.q.view(s.rows, -1), None)
            else:
                self._attend_chosen(shape, w, form, of_form, batch, kv, s)
        a = of_form.attended
        if gate is not None:
            assert a.x is not None
            sigmoid_gate(
                a.x, gate, shape.v_dim, count, a.codes, a.scales, softplus=shape.gate == "head_softplus"
            )
        output = s.output.view(s.rows, -1)
        multiply(w.output, a, count, output, s.dense)
        if adapters is not None:
            adapters.add(GpuActivations(a.x, None, None), (names.ATTN_OUTPUT,), [output])

    def store(
        self,
        shape: AttentionShape,
        w: GpuAttention,
        kv: KvLayer,
        batch: GpuBatch,
        s: GpuWorkspace,
        joined: GpuActivations | None = None,
    ) -> None:
        """Launches only the computation and storing of a layer's keys and values, for rows that do not attend. Reads
        s.y, the norm of x, or `joined`, see `attend`."""
        form, of_form = self._forms[shape.form], s.forms[shape.form]
        q, _, k, v = _project(shape, w, batch.count, s, joined)
        assert k is not None
        rope_store(
            q, k, v, w.q_norm, w.k_norm, self._eps, form.cos, form.sin, batch.positions, batch.kv_slots, batch.count,
            of_form.q, kv.keys, kv.values, kv.key_scales, kv.value_scales, self._eps if shape.has_v_norm else None,
            norm_after=shape.norm_after, v_scale=shape.v_scale, sections=form.sections_of(batch.rotary_positions),
        )  # fmt: skip

    def _attend(
        self,
        shape: AttentionShape,
        w: GpuAttention,
        of_form: AttentionWorkspace,
        batch: GpuBatch,
        kv: KvLayer,
        table: Tensor,
        q: Tensor,
        new: NewTokens | None,
    ) -> None:
        a = of_form.attended
        together, d = (
            (MAX_DECODE_ROWS, of_form.decode)
            if batch.tiles is None
            else (MIXED_DECODE_ROWS, of_form.mixed_decode)
        )
        assert a.x is not None
        for first in range(0, batch.num_decode, together):
            part = slice(first, min(first + together, batch.num_decode))
            count = batch.count if batch.decode_counts is None else batch.decode_counts[first // together]
            codes = None if a.codes is None else a.codes[part]
            scales = None if a.scales is None else a.scales[part]
            mine = None if new is None else _part_of(new, part)
            # Independent rows see up to themselves.
            ends = batch.ends if self._sees_ahead(shape) and not batch.rows_independent else None
            decode_attention(
                q[part], mine, kv.keys, kv.values, table, batch.req_slots[part], batch.positions[part],
                count, d, a.x[part], codes, scales,
                key_scales=kv.key_scales, value_scales=kv.value_scales, window=shape.window, sinks=w.sinks,
                scale=shape.scale, ends=None if ends is None else ends[part], score_cap=shape.score_cap,
            )  # fmt: skip
        if batch.tiles is not None:
            prefill_attention(
                of_form.q,
                kv.keys,
                kv.values,
                table,
                batch.tiles[self._forms[shape.form].index],
                a.x,
                key_scales=kv.key_scales,
                value_scales=kv.value_scales,
                window=shape.window,
                sinks=w.sinks,
                scale=shape.scale,
                ends=batch.ends if self._sees_ahead(shape) and batch.sees_ahead else None,
                score_cap=shape.score_cap,
            )

    def _sees_ahead(self, shape: AttentionShape) -> bool:
        return shape.window > 0 or self._full_layers_see_ahead

    def _attend_chosen(
        self,
        shape: AttentionShape,
        w: GpuAttention,
        form: GpuForm,
        of_form: AttentionWorkspace,
        batch: GpuBatch,
        kv: KvLayer,
        s: GpuWorkspace,
    ) -> None:
        """Chooses blocks of keys for each row and attends to them. Prompt rows are treated like decode rows, but
        without splits: a prompt has enough rows to fill a GPU."""
        space, a, table = s.indexer, of_form.attended, self._slot_table
        assert shape.indexer is not None
        assert w.indexer is not None
        assert space is not None
        choose_blocks(shape.indexer, w.indexer, self._eps, form, kv, table, batch, s, space)
        is_split = batch.tiles is None
        rows = batch.num_decode if is_split else s.rows
        together = MAX_DECODE_ROWS if is_split else rows
        for first in range(0, rows, together):
            part = slice(first, min(first + together, rows))
            attend_blocks(
                of_form.q[part], kv, table, batch.req_slots[part], space.chosen[part], space.lasts[part], batch.count,
                shape.indexer.rule.block, of_form.decode if is_split else None, _rows_of(a, part), scale=shape.scale,
            )  # fmt: skip


def _rows_of(x: GpuActivations, rows: slice) -> GpuActivations:
    return GpuActivations(*(None if part is None else part[rows] for part in (x.x, x.codes, x.scales)))


def _part_of(new: NewTokens, rows: slice) -> NewTokens:
    sections = None if new.sections is None else new.sections.part(rows)
    return replace(new, k=new.k[rows], v=new.v[rows], slots=new.slots[rows], sections=sections)


def _project(
    shape: AttentionShape, w: GpuAttention, count: Tensor, s: GpuWorkspace, joined: GpuActivations | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launches the products of s.y, or of `joined`. Returns q, its gate, k and v; without k and v for a layer that
    attends to another one's."""
    gates = [shape.gate_width] if shape.gate_width else []
    keys = [] if shape.kv_from is not None else [shape.kv_width]
    values = [] if shape.kv_from is not None or shape.v_from_k else [shape.value_width]
    widths = [shape.q_width, *gates, *keys, *values]
    q, *rest = multiply_all(w.qkv, widths, s.y if joined is None else joined, count, s.projected, s.dense)
    gate = rest.pop(0) if gates else None
    return (q, gate, rest[0], rest[-1]) if rest else (q, gate, None, None)


def _add_adapters(
    adapters: LayerAdapters,
    shape: AttentionShape,
    y: GpuActivations,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
) -> None:
    if k is None or v is None:
        adapters.add(y, QKV_PARTS[:1], [q])
    else:
        adapters.add(y, QKV_PARTS, [k, v] if shape.is_gated else [q, k, v])

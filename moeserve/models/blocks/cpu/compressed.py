"""Compressed attention on the pool's stream: x += output_b(output_a(rotated back(attention(q, keys and entries)))).

q = q_b(norm(q_a(y))); keys and the compressors' inputs are products of y = norm(x). A sequence's state holds the keys
of its window and the entries in progress; each token is added to these entries. An entry that a token completes is
stored in the token's KV slot. The token's row and later rows attend to that entry; with an indexer, only rows that
choose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.compressed.plan import Int32s, build_compressed_plan
from moeserve.kernels.compressed_operations import RowAngles
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import Heads, KeyRings, KvLayer, StateLayer
from moeserve.models.blocks.cpu.forms import CpuForm
from moeserve.models.blocks.cpu.residual import add_product, read_residual
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_compressed import GROUP_MATRICES
from moeserve.models.loading.cpu_weights import CpuCompressedAttention, CpuMixer

PlanKey = tuple[int, int, int]  # window, tokens of a block, entries that are chosen


class CompressedPlans:
    """The attention plans of a step; layers that attend to the same rows share one."""

    def __init__(self, model: ModelShape, kv: Sequence[KvLayer]) -> None:
        self._heads: dict[PlanKey, Heads] = {}
        self._rings: dict[PlanKey, KeyRings] = {}
        for layer, of_layer in zip(model.loaded_layers, kv, strict=False):
            if isinstance(layer.mixer, CompressedAttentionShape):
                assert of_layer.rings is not None
                self._heads[_key(layer.mixer)] = heads_of(layer.mixer)
                self._rings[_key(layer.mixer)] = of_layer.rings
        self._plans: Mapping[PlanKey, _C.CompressedPlan] = {key: _C.CompressedPlan() for key in self._heads}

    def build(
        self,
        rows: Int32s,
        counts: Int32s,
        positions: Int32s,
        req_slots: Int32s,
        state_slots: Int32s,
        slot_table: Int32s,
        threads: int,
    ) -> None:
        """Plans the next step; arguments as for `build_compressed_plan`."""
        columns = (rows, counts, positions, req_slots, state_slots)
        for key, plan in self._plans.items():
            window, ratio, top = key
            build_compressed_plan(
                *(plan, *columns, slot_table, self._rings[key], self._heads[key], threads),
                window=window,
                ratio=ratio,
                top=top,
            )

    @property
    def kinds(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Returns for each plan whether its rows choose entries, and whether keys are copied to their rings after the
        step."""
        plans = self._plans.values()
        return tuple(plan.chooses for plan in plans), tuple(plan.copies_keys for plan in plans)

    @classmethod
    def for_model(cls, model: ModelShape, kv: Sequence[KvLayer]) -> CompressedPlans | None:
        """Returns the plans; None if the model has another kind of attention. kv: one per layer."""
        return cls(model, kv) if isinstance(model.heads, CompressedAttentionShape) else None

    def of(self, shape: CompressedAttentionShape) -> _C.CompressedPlan:
        return self._plans[_key(shape)]


def _key(shape: CompressedAttentionShape) -> PlanKey:
    return shape.window, shape.ratio, shape.chosen


def heads_of(shape: CompressedAttentionShape) -> Heads:
    return Heads(shape.num_heads, shape.head_parts, shape.head_dim, shape.head_dim, is_latent=True)


def project_compressed(
    stream: CpuStream,
    w: CpuMixer | None,
    shape: CompressedAttentionShape,
    eps: float,
    n: int,
    space: CpuWorkspace,
) -> None:
    """Launches the products of norm(x), and of the compressed q. w: a CpuCompressedAttention. eps: added to the mean
    square under the norm's root; n: rows of the step."""
    s = space.compressed
    assert isinstance(w, CpuCompressedAttention)
    assert s is not None
    read_residual(stream, w.norm, eps, n, space)
    outputs = [s.q_a, s.kv, *(product for pair in s.products(shape) for product in pair)]
    if shape.indexer is not None:
        assert s.index_weights is not None
        outputs.append(s.index_weights)
    for first, group in zip(range(0, len(outputs), GROUP_MATRICES), w.inputs, strict=True):
        stream.linear(space.y, n, group, outputs[first : first + GROUP_MATRICES])
    stream.norm(s.q_a, w.q_a_norm, eps, n, s.q_a_normed)
    stream.linear(s.q_a_normed, n, w.q_b, [space.q])


def attend_compressed(
    stream: CpuStream,
    w: CpuMixer | None,
    shape: CompressedAttentionShape,
    form: CpuForm,
    plans: CompressedPlans | None,
    eps: float,
    kv: KvLayer,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    pending: Tensor | None,
) -> None:
    """Launches the rest of a compressed-attention block after `project_compressed`: compression, attention and the
    output projection, whose result goes where `block_output` says.

    w: a CpuCompressedAttention; plans: the step's plans; pending: this layer's draft record (bytes), if rows may have
    drafts, else None; eps: added to the mean square under the norm's root.
    """
    assert isinstance(w, CpuCompressedAttention)
    assert plans is not None
    n, s, plan = batch.n, space.compressed, plans.of(shape)
    assert s is not None
    # A step whose rows attend to all entries needs no index queries.
    indexer = shape.indexer if plan.chooses else None
    if indexer is not None:
        assert w.index_q_b is not None
        assert s.index_q is not None
        stream.linear(s.q_a_normed, n, w.index_q_b, [s.index_q])
    angles = RowAngles(form.cos, form.sin, batch.positions)
    stream.compressed_store(
        space.q, s.kv, w.kv_norm, eps, shape.scale, angles, plan, kv, n, shape.num_heads,
        index_q=None if indexer is None else s.index_q,
        index_heads=0 if indexer is None else indexer.num_heads,
    )  # fmt: skip
    _compress(stream, w, shape, eps, angles, kv, state, batch, space, pending)
    if indexer is not None:
        assert s.index_q is not None
        assert s.index_weights is not None
        stream.choose_entries(plan, s.index_q, s.index_weights, kv, indexer.num_heads)
    stream.attention(plan.attention, space.q, kv, s.attended, heads_of(shape), sinks=w.sinks)
    stream.keep_keys(plan, kv)
    stream.rotate_back(s.grouped, n, shape.num_heads, shape.head_dim, angles)
    stream.linear_by_head(s.grouped, n, w.output_a, space.widest_mixed)
    add_product(stream, space.widest_mixed, n, w.output_b, space)


def _compress(
    stream: CpuStream,
    w: CpuCompressedAttention,
    shape: CompressedAttentionShape,
    eps: float,
    angles: RowAngles,
    kv: KvLayer,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    pending: Tensor | None,
) -> None:
    s, at = space.compressed, state.first
    assert s is not None
    targets = [kv.keys, kv.index_keys]
    records = records_of(shape, pending)
    for i, (compressor, (product, gate)) in enumerate(zip(shape.compressors, s.products(shape), strict=True)):
        entries = targets[i]
        assert entries is not None
        assert batch.states is not None
        stream.compress(
            product, gate, w.compressors[i], eps, angles, batch.kv_slots, entries,
            StateLayer(state.states, at), batch.states, batch.n, records[i],
        )  # fmt: skip
        at += compressor.state_values


def commit_compressed(
    stream: CpuStream,
    w: CpuMixer | None,
    shape: CompressedAttentionShape,
    state: StateLayer,
    slot: Tensor,
    first: Tensor,
    accepted: Tensor,
    pending: Tensor,
) -> None:
    """Launches the commit of accepted drafts to the compressors' states: see `CpuStream.commit_compressed`. w: a
    CpuCompressedAttention; slot, first, accepted: int32 [sequences]; pending: the layer's draft record."""
    assert isinstance(w, CpuCompressedAttention)
    at, records = state.first, records_of(shape, pending)
    for compressor, parameters, record in zip(shape.compressors, w.compressors, records, strict=True):
        assert record is not None
        stream.commit_compressed(parameters, StateLayer(state.states, at), slot, first, accepted, record)
        at += compressor.state_values


def records_of(shape: CompressedAttentionShape, pending: Tensor | None) -> list[Tensor | None]:
    """Returns each compressor's part of a layer's draft record, float32 [records, pending_values]."""
    if pending is None:
        return [None] * len(shape.compressors)
    memory, found, at = pending.view(-1), list[Tensor | None](), 0
    for compressor in shape.compressors:
        size = len(pending) * compressor.pending_values
        found.append(memory[at : at + size].view(len(pending), -1))
        at += size
    return found

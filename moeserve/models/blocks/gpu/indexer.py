"""Indexers, as launches on the current stream: choose the keys that the step's rows attend to; the same network as
blocks/cpu/indexer.py."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.choice_rule import stride_of_choice
from moeserve.kernels.indexer.op import (
    block_index_store,
    choose,
    index_store,
    pool_store,
    rows_together,
    score_blocks,
    score_keys,
)
from moeserve.kernels.stream_operands import KvLayer
from moeserve.models.blocks.gpu.forms import GpuForm
from moeserve.models.blocks.gpu.latent_workspace import IndexerWorkspace
from moeserve.models.blocks.gpu.linear import multiply, multiply_all
from moeserve.models.blocks.gpu.workspace import GpuBatch, GpuWorkspace
from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.loading.gpu_weights import GpuBlockIndexer, GpuIndexer


def choose_keys(
    shape: IndexerShape,
    w: GpuIndexer,
    form: GpuForm,
    kv: KvLayer,
    table: Tensor,
    batch: GpuBatch,
    q_a: GpuActivations,
    s: GpuWorkspace,
    space: IndexerWorkspace,
) -> None:
    """Launches an indexer: stores the rows' index keys and chooses the keys that each row attends to. Reads s.y [rows,
    hidden], the layer's input, and q_a [rows, q_rank], the compressed q. Writes `space.chosen` and `space.lasts`
    (int32)."""
    assert kv.index_keys is not None
    count = batch.count
    widths = [shape.dim, shape.num_heads, *([shape.gate_width] if shape.is_pooled else [])]
    keys, weights, *gates = multiply_all(w.inputs, widths, s.y, count, space.projected, s.dense)
    multiply(w.q_b, q_a, count, space.q, s.dense)
    if w.ape is not None:
        pool_store(
            space.q, keys, gates[0], w.k_norm, w.k_bias, shape.eps, w.ape, table, batch.req_slots, batch.positions,
            batch.kv_slots, count, space.queries, kv.index_keys,
        )  # fmt: skip
    else:
        index_store(
            space.q, keys, w.k_norm, w.k_bias, shape.eps, form.cos, form.sin, batch.positions, batch.kv_slots, count,
            space.queries, kv.index_keys, in_pairs=shape.in_pairs,
        )  # fmt: skip
    together = rows_together(space.scores, s.rows, stride_of_choice(table.stride(0), shape.rule))
    for first in range(0, s.rows, together):
        rows = min(together, s.rows - first)
        some = (table, batch.req_slots, batch.positions, count, space.row_numbers[first:], rows, shape.rule)
        score_keys(
            space.queries, weights, kv.index_keys, *some, space.scores, are_prompts=batch.tiles is not None
        )
        choose(space.scores, *some, space.chosen, space.lasts)


def choose_blocks(
    shape: BlockIndexerShape,
    w: GpuBlockIndexer,
    eps: float,
    form: GpuForm,
    kv: KvLayer,
    table: Tensor,
    batch: GpuBatch,
    s: GpuWorkspace,
    space: IndexerWorkspace,
) -> None:
    """Launches an indexer of blocks: stores the rows' index keys and chooses the blocks of keys that each row attends
    to. Reads s.y [rows, hidden], the layer's input. Writes `space.chosen` and `space.lasts` (int32). eps: added to the
    mean square under the norm's root."""
    assert kv.index_keys is not None
    count, rule = batch.count, shape.rule
    q, keys = multiply_all(w.inputs, [shape.q_width, shape.dim], s.y, count, space.projected, s.dense)
    block_index_store(
        q, keys, w.q_norm, w.k_norm, eps, form.cos, form.sin, table, batch.req_slots, batch.positions, batch.kv_slots,
        count, rule, space.queries, kv.index_keys, form.sections_of(batch.rotary_positions), batch.rotary_firsts,
    )  # fmt: skip
    together = rows_together(space.scores, s.rows, shape.choices * stride_of_choice(table.stride(0), rule))
    for first in range(0, s.rows, together):
        rows = min(together, s.rows - first)
        some = (table, batch.req_slots, batch.positions, count, space.row_numbers[first:], rows, rule)
        are_prompts = batch.tiles is not None
        if rule.local:
            score_blocks(space.queries, kv.index_keys, *some, space.scores, are_prompts=are_prompts)
        else:
            score_keys(space.queries, None, kv.index_keys, *some, space.scores, are_prompts=are_prompts)
        choose(space.scores, *some, space.chosen, space.lasts)

"""Loads a layer's attention over grouped heads for the CPU, with its indexer of blocks if it has one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeserve.kernels.cpu_stream import LinearGroup, Matrix
from moeserve.models.attention import AttentionShape
from moeserve.models.loading.cpu_indexer import load_block_indexer
from moeserve.models.loading.cpu_residual import LoadMatrix, Vector
from moeserve.models.loading.cpu_weights import CpuAttention, CpuInput
from moeserve.models.sources.gguf import names as n

# Loads a matrix of q and its gates as two, by its full name and the number of heads.
LoadGatedQ = Callable[[str, int], tuple[Matrix, Matrix]]


def load_attention(
    shape: AttentionShape,
    index: int,
    norm: CpuInput,
    vector: Vector,
    matrix: LoadMatrix,
    gated_q: LoadGatedQ,
    *,
    is_sandwiched: bool,
) -> CpuAttention:
    """Loads and returns the weights of layer `index`'s attention. vector: loads a float32 vector by its full name;
    matrix: loads a matrix; gated_q: loads the q or the gate part of a matrix that holds both. norm: the norm or stream
    mix before the layer. is_sandwiched: the layer's blocks have norms behind them."""
    has_norm = shape.qk_norm in ("head", "full")
    ones = torch.ones(shape.head_dim) if shape.qk_norm == "unweighted" else None
    has_k_norm = has_norm and shape.kv_from is None
    output_bias = [vector(n.bias_of_layer(index, n.ATTN_OUTPUT))] if shape.output_bias else None
    return CpuAttention(
        norm=norm,
        qkv=_gated_qkv(shape, index, vector, matrix, gated_q)
        if shape.is_gated
        else _qkv(shape, index, vector, matrix),
        q_norm=vector(n.of_layer(index, n.ATTN_Q_NORM)) if has_norm else ones,
        k_norm=vector(n.of_layer(index, n.ATTN_K_NORM)) if has_k_norm else ones,
        output=LinearGroup([matrix(n.of_layer(index, n.ATTN_OUTPUT))], output_bias),
        sinks=vector(n.of_layer(index, n.ATTN_SINKS)) if shape.has_sinks else None,
        v_norm=torch.ones(shape.v_dim) if shape.has_v_norm else None,
        output_norm=vector(n.of_layer(index, n.POST_ATTENTION_NORM)) if is_sandwiched else None,
        indexer=load_block_indexer(shape.indexer, index, vector, matrix),
    )


def _qkv(shape: AttentionShape, index: int, vector: Vector, matrix: LoadMatrix) -> LinearGroup:
    parts = (*shape.qkv_parts, n.ATTN_GATE) if shape.has_gate_matrix else shape.qkv_parts
    matrices = [matrix(n.of_layer(index, part)) for part in parts]
    if not shape.qkv_bias:
        return LinearGroup(matrices)
    return LinearGroup(matrices, [vector(n.bias_of_layer(index, part)) for part in parts])


def _gated_qkv(
    shape: AttentionShape, index: int, vector: Vector, matrix: LoadMatrix, gated_q: LoadGatedQ
) -> LinearGroup:
    """Loads the qkv group with q's rows and gates separated."""
    k, v = (matrix(n.of_layer(index, part)) for part in (n.ATTN_K, n.ATTN_V))  # first: kv_products.py
    q, gate = gated_q(n.of_layer(index, n.ATTN_Q), shape.num_heads)
    matrices = [q, k, v, gate]
    if not shape.qkv_bias:
        return LinearGroup(matrices)
    parts = (n.ATTN_Q, n.ATTN_K, n.ATTN_V)
    q_bias, k_bias, v_bias = (vector(n.bias_of_layer(index, part)) for part in parts)
    of_q, of_gate = q_bias.view(shape.num_heads, 2, -1).unbind(1)
    return LinearGroup(matrices, [of_q.reshape(-1), k_bias, v_bias, of_gate.reshape(-1)])

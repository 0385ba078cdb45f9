"""Loads a layer's latent attention for the CPU, with its indexer if it has one."""

from __future__ import annotations

from moeserve.kernels.cpu_stream import LinearGroup
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.loading.cpu_indexer import load_indexer
from moeserve.models.loading.cpu_residual import LoadMatrix, Vector
from moeserve.models.loading.cpu_weights import CpuInput, CpuLatentAttention
from moeserve.models.sources.gguf import names as n


def load_latent_attention(
    shape: LatentAttentionShape, index: int, norm: CpuInput, vector: Vector, matrix: LoadMatrix
) -> CpuLatentAttention:
    """Loads the attention of layer `index`. norm: the norm or stream mix before the layer."""
    has_q_a = shape.q_rank > 0
    output_bias = [vector(n.bias_of_layer(index, n.ATTN_OUTPUT))] if shape.output_bias else None
    return CpuLatentAttention(
        norm=norm,
        inputs=_inputs(shape, index, vector, matrix),
        q_a_norm=vector(n.of_layer(index, n.ATTN_Q_A_NORM)) if has_q_a else None,
        q_b=LinearGroup([matrix(n.of_layer(index, n.ATTN_Q_B))]) if has_q_a else None,
        latent_norm=vector(n.of_layer(index, n.ATTN_KV_A_NORM)),
        k_b=matrix(n.of_layer(index, n.ATTN_K_B)),
        v_b=matrix(n.of_layer(index, n.ATTN_V_B)),
        output=LinearGroup([matrix(n.of_layer(index, n.ATTN_OUTPUT))], output_bias),
        indexer=load_indexer(shape.indexer, index, vector, matrix),
    )


def _inputs(shape: LatentAttentionShape, index: int, vector: Vector, matrix: LoadMatrix) -> LinearGroup:
    matrices = [matrix(n.of_layer(index, part)) for part, _ in shape.input_parts]
    if not shape.input_bias:
        return LinearGroup(matrices)
    biases = [
        vector(n.bias_of_layer(index, part)) if part in shape.biased_parts else None
        for part, _ in shape.input_parts
    ]
    return LinearGroup(matrices, biases)

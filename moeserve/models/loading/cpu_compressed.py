"""Loads a layer's compressed attention for the CPU."""

from __future__ import annotations

from collections.abc import Callable

from moeserve.kernels.compressed_operations import CompressorParameters
from moeserve.kernels.cpu_stream import LinearGroup, Matrix
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.loading.cpu_residual import LoadMatrix, Vector
from moeserve.models.loading.cpu_weights import CpuCompressedAttention, CpuInput
from moeserve.models.sources.gguf import names as n

GROUP_MATRICES = 4  # maximum number that one operation multiplies


def load_compressed_attention(
    shape: CompressedAttentionShape,
    index: int,
    norm: CpuInput,
    vector: Vector,
    matrix: LoadMatrix,
    by_group: Callable[[str, int], Matrix],
) -> CpuCompressedAttention:
    """Loads and returns the weights of layer `index`'s compressed attention. vector, matrix: load a float32 vector and
    a matrix by their full names. norm: the norm or stream mix before it. by_group: loads a matrix as a given number of
    matrices, each with an equal part of the rows."""
    parts = [matrix(n.of_layer(index, part)) for part, _ in shape.input_parts]
    index_q = None if shape.indexer is None else matrix(n.of_layer(index, n.INDEXER_Q_B))
    return CpuCompressedAttention(
        norm=norm,
        inputs=[
            LinearGroup(parts[first : first + GROUP_MATRICES])
            for first in range(0, len(parts), GROUP_MATRICES)
        ],
        q_a_norm=vector(n.of_layer(index, n.ATTN_Q_A_NORM)),
        q_b=LinearGroup([matrix(n.of_layer(index, n.ATTN_Q_B))]),
        index_q_b=None if index_q is None else LinearGroup([index_q]),
        kv_norm=vector(n.of_layer(index, n.ATTN_KV_A_NORM)),
        compressors=[
            CompressorParameters(vector(n.of_layer(index, names.bias)), vector(n.of_layer(index, names.norm)))
            for _, names in zip(shape.compressors, n.COMPRESSORS, strict=False)
        ],
        sinks=vector(n.of_layer(index, n.ATTN_SINKS)),
        output_a=by_group(n.of_layer(index, n.ATTN_OUTPUT_A), shape.output_groups),
        output_b=LinearGroup([matrix(n.of_layer(index, n.ATTN_OUTPUT_B))]),
    )

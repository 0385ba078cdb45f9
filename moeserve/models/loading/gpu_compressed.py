"""Loads to a GPU what only DeepSeek-V4 has: compressed attention, and experts by token id."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.kernels.compressed_operations import CompressorParameters
from moeserve.kernels.planes import Planes
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.feed_forward import MoeShape
from moeserve.models.loading.gpu_inputs import GpuInput
from moeserve.models.loading.gpu_residual import LoadMerged, Vector
from moeserve.models.loading.gpu_weights import GpuCompressedAttention
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


def load_compressed_attention(
    shape: CompressedAttentionShape,
    index: int,
    norm: GpuInput,
    vector: Vector,
    merged: LoadMerged,
    by_group: Callable[[str, int], Planes],
) -> GpuCompressedAttention:
    """Loads and returns the weights of layer `index`'s compressed attention. vector: loads a float32 vector by its full
    name; merged: loads matrices over the same input. norm: the norm or stream mix before it. by_group: loads a matrix
    as a given number of matrices, each with an equal part of the rows."""

    def name(part: str) -> str:
        return n.of_layer(index, part)

    of_q = (n.ATTN_Q_B,) if shape.indexer is None else (n.ATTN_Q_B, n.INDEXER_Q_B)
    (output,) = merged(name(n.ATTN_OUTPUT_B))
    return GpuCompressedAttention(
        norm=norm,
        inputs=merged(*(name(part) for part, _ in shape.input_parts)),
        q_a_norm=vector(name(n.ATTN_Q_A_NORM)),
        q_b=merged(*map(name, of_q)),
        kv_norm=vector(name(n.ATTN_KV_A_NORM)),
        compressors=[
            CompressorParameters(vector(name(names.bias)), vector(name(names.norm)))
            for _, names in zip(shape.compressors, n.COMPRESSORS, strict=False)
        ],
        sinks=vector(name(n.ATTN_SINKS)),
        output_a=by_group(name(n.ATTN_OUTPUT_A), shape.output_groups),
        output=output,
    )


def load_by_token(source: ModelSource, shape: MoeShape, index: int, device: torch.device) -> Tensor | None:
    """Loads the experts of each token id, int32 [vocab, top_k]; returns None if the router's scores choose experts.
    Raises ModelError for an expert number that is out of range: a kernel would read other memory."""
    if not shape.by_token:
        return None
    tensor = source.tensors[n.of_layer(index, n.EXPERTS_BY_TOKEN)]
    ids = torch.frombuffer(bytearray(source.data(tensor.name)), dtype=torch.int32).view(tensor.shape)
    wrong = ids[(ids < 0) | (ids >= shape.num_experts)]
    if len(wrong):
        raise ModelError(
            source.path,
            f"tensor {tensor.name!r} names expert {int(wrong[0])}; there are {shape.num_experts}, from 0 on. Download "
            "or convert the file again",
        )
    return ids.to(device)

"""Loads the weights of a residual of several streams, and of n-gram embeddings, to a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.kernels.codebooks import bring_codebook
from moeserve.kernels.residual_operations import NgramNorms
from moeserve.kernels.streams.attended_op import StreamAttention
from moeserve.kernels.streams.sinkhorn import SinkhornMix
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_inputs import (
    GpuAttendedStreams,
    GpuInput,
    GpuSinkhornMix,
    GpuStreamMean,
    GpuStreamMix,
)
from moeserve.models.loading.gpu_weights import GpuNgrams
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.models.loading.unnormed import Unnormed
from moeserve.models.residual import AttentionResiduals, SinkhornConnections
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

Vector = Callable[[str], Tensor]  # loads a vector by its full name
LoadMerged = Callable[..., list[MergedLinear]]  # loads matrices over the same input by their full names


def load_input(
    shape: ModelShape, block: str, norm: str, index: int | None, vector: Vector, merged: LoadMerged
) -> GpuInput:
    """Loads and returns the norm or stream mix that computes a block's input from the residual. index: the block's
    layer; None: the head. norm: the norm's full name. block: the beginning of the tensors' names, for a residual of
    several streams."""
    if index is not None and not shape.loaded_layers[index].has_input_norms:
        return Unnormed()
    if shape.streams is None:
        return vector(norm)

    def name(part: str) -> str:
        return n.of_part(f"{block}_{part}") if index is None else n.of_layer(index, f"{block}_{part}")

    if isinstance(shape.streams, AttentionResiduals):
        part = n.RES_SCORES[block]
        score = vector(n.of_part(part) if index is None else n.of_layer(index, part))
        reading = torch.tensor(shape.streams.reading(block, index), dtype=torch.int32, device=score.device)
        return GpuAttendedStreams(StreamAttention(score, vector(norm), reading))
    if isinstance(shape.streams, SinkhornConnections):
        connections = shape.streams
        if index is None and not connections.weighs_head:
            return GpuStreamMean(vector(norm))
        (product,) = merged(name("fn"))
        mix = SinkhornMix(
            vector(name("base")), vector(name("scale")), connections.eps, connections.iterations
        )
        return GpuSinkhornMix(product, mix, vector(norm))
    down = ("down",) if index is None else ("down", "inject")  # the head injects nothing
    (up,) = merged(name("up"))
    return GpuStreamMix(
        norm=vector(name("norm")).view(shape.streams.count, -1),
        down=merged(*(name(part) for part in down)),
        up=up,
    )


def load_ngrams(
    source: ModelSource, model: ModelShape, index: int, vector: Vector, merged: LoadMerged
) -> GpuNgrams | None:
    """Loads the weights of layer `index`'s n-gram embeddings; their table stays in the file. Returns None for a layer
    that adds none."""
    shape = model.ngrams
    if shape is None or shape.layer != index:
        return None
    norms = (n.PLE_NORM_QUERY, n.PLE_NORM_KEY, n.PLE_NORM_CONV)
    table = NgramRows(source, shape)
    bring_codebook(table.ggml_type)
    return GpuNgrams(
        table=table,
        products=merged(*(n.of_layer(index, part) for part in (n.PLE_KEY, n.PLE_VALUE))),
        norms=NgramNorms(*(vector(n.of_layer(index, norm)) for norm in norms)),
        conv=vector(n.of_layer(index, n.PLE_CONV1D)).view(-1, shape.conv_kernel).t().contiguous(),
    )

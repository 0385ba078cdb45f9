"""Loads the weights of a residual of several streams, and of n-gram embeddings, for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import LinearGroup, Matrix
from moeserve.kernels.residual_operations import NgramNorms
from moeserve.kernels.streams.sinkhorn import SinkhornMix
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_weights import (
    CpuAttendedStreams,
    CpuInput,
    CpuLayerNorm,
    CpuNgrams,
    CpuNorm,
    CpuSinkhornMix,
    CpuStreamMean,
    CpuStreamMix,
)
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.models.loading.unnormed import Unnormed
from moeserve.models.residual import AttentionResiduals, SinkhornConnections
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

Vector = Callable[[str], Tensor]  # loads a vector by its full name
LoadMatrix = Callable[[str], Matrix]


def load_input(
    shape: ModelShape, block: str, norm: str, index: int | None, vector: Vector, matrix: LoadMatrix
) -> CpuInput:
    """Loads and returns the norm or stream mix that computes a block's input from the residual. index: the block's
    layer; None: the head. norm: the norm's full name. block: the beginning of the tensors' names, for a residual of
    several streams."""
    if index is not None and not shape.loaded_layers[index].has_input_norms:
        return Unnormed()
    streams = shape.streams if index is None else shape.streams_of(index)
    if streams is None:
        return load_norm(shape, norm, vector)

    def name(part: str) -> str:
        return n.of_part(f"{block}_{part}") if index is None else n.of_layer(index, f"{block}_{part}")

    down = ("down",) if index is None else ("down", "inject")  # the head injects nothing
    if isinstance(streams, AttentionResiduals):
        part = n.RES_SCORES[block]
        score = vector(n.of_part(part) if index is None else n.of_layer(index, part))
        return CpuAttendedStreams(score, vector(norm), streams.reading(block, index))
    if isinstance(streams, SinkhornConnections):
        if index is None and not streams.weighs_head:
            return CpuStreamMean(vector(norm))
        return CpuSinkhornMix(
            ones=torch.ones(streams.count * shape.hidden_size),
            product=LinearGroup([matrix(name("fn"))]),
            mix=SinkhornMix(vector(name("base")), vector(name("scale")), streams.eps, streams.iterations),
            norm=vector(norm),
        )
    return CpuStreamMix(
        norm=vector(name("norm")).view(streams.count, -1),
        down=LinearGroup([matrix(name(part)) for part in down]),
        up=LinearGroup([matrix(name("up"))]),
    )


def load_norm(shape: ModelShape, norm: str, vector: Vector) -> CpuNorm:
    """Loads a norm of one vector, of the kind that the model's residual has."""
    return CpuLayerNorm(vector(norm)) if shape.centers_norms else vector(norm)


def scaled(norm: CpuInput, factor: float) -> CpuNorm:
    """Returns the norm with its weight multiplied by a factor. The norm must not be one of several streams."""
    assert isinstance(norm, Tensor | CpuLayerNorm)
    return CpuLayerNorm(norm.weight * factor) if isinstance(norm, CpuLayerNorm) else norm * factor


def load_ngrams(
    source: ModelSource, model: ModelShape, num_layers: int, vector: Vector, matrix: LoadMatrix
) -> CpuNgrams | None:
    """Loads the n-gram embeddings' weights; their table stays in the file. Returns None if none of the first
    `num_layers` layers adds n-gram embeddings."""
    shape = model.ngrams
    if shape is None or shape.layer >= num_layers:
        return None
    index = shape.layer
    conv = vector(n.of_layer(index, n.PLE_CONV1D)).view(-1, shape.conv_kernel)
    norms = (n.PLE_NORM_QUERY, n.PLE_NORM_KEY, n.PLE_NORM_CONV)
    return CpuNgrams(
        table=NgramRows(source, shape),
        products=LinearGroup([matrix(n.of_layer(index, part)) for part in (n.PLE_KEY, n.PLE_VALUE)]),
        norms=NgramNorms(*(vector(n.of_layer(index, norm)) for norm in norms)),
        conv=conv.t().contiguous(),
    )

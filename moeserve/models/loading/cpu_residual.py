"""Loads what belongs to a residual of several streams, and n-gram embeddings, for the CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moeserve.kernels.cpu_stream import LinearGroup, Matrix
from moeserve.kernels.residual_operations import NgramNorms
from moeserve.models.loading.cpu_weights import CpuNgrams, CpuStreamMix
from moeserve.models.loading.table_rows import TableRows
from moeserve.models.residual import HyperConnections, NgramShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

Vector = Callable[[str], Tensor]  # loads a vector by its full name
LoadMatrix = Callable[[str], Matrix]


def load_stream_mix(
    streams: HyperConnections, block: str, index: int | None, vector: Vector, matrix: LoadMatrix
) -> CpuStreamMix:
    """Loads what a block of layer `index` reads the residual through; None: the head, which injects nothing."""

    def name(part: str) -> str:
        return n.of_part(f"{block}_{part}") if index is None else n.of_layer(index, f"{block}_{part}")

    down = ("down",) if index is None else ("down", "inject")
    return CpuStreamMix(
        norm=vector(name("norm")).view(streams.count, -1),
        down=LinearGroup([matrix(name(part)) for part in down]),
        up=LinearGroup([matrix(name("up"))]),
    )


def load_ngrams(source: ModelSource, shape: NgramShape, vector: Vector, matrix: LoadMatrix) -> CpuNgrams:
    """Loads the n-gram embeddings; their table stays in the file."""
    index = shape.layer
    conv = vector(n.of_layer(index, n.PLE_CONV1D)).view(-1, shape.conv_kernel)
    norms = (n.PLE_NORM_QUERY, n.PLE_NORM_KEY, n.PLE_NORM_CONV)
    return CpuNgrams(
        table=TableRows(source, n.LAYER_INPUT_EMBD),
        products=LinearGroup([matrix(n.of_layer(index, part)) for part in (n.PLE_KEY, n.PLE_VALUE)]),
        norms=NgramNorms(*(vector(n.of_layer(index, norm)) for norm in norms)),
        conv=conv.t().contiguous(),
    )

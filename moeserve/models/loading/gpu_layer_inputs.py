"""Loads the weights of per-layer embeddings to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from moeserve.kernels.norm.sandwich_norms import SandwichNorms
from moeserve.kernels.planes import Planes
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_weights import GpuLayerInput, GpuLayerInputs
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.sources.gguf import names as n

Vector = Callable[[str], Tensor]  # loads a vector by its full name
LoadPlanes = Callable[[str], Planes]
LoadMerged = Callable[..., list[MergedLinear]]  # loads matrices over the same input by their full names


def load_layer_inputs(
    shape: ModelShape, vector: Vector, planes: LoadPlanes, merged: LoadMerged
) -> GpuLayerInputs | None:
    """Loads what computes all layers' inputs from tokens; None for a model whose layers have none."""
    if not shape.layer_input_width:
        return None
    (projection,) = merged(n.LAYER_INPUT_MODEL_PROJ)
    return GpuLayerInputs(planes(n.LAYER_INPUT_EMBD), projection, vector(n.LAYER_INPUT_PROJ_NORM))


def load_layer_input(
    shape: ModelShape, index: int, norms: SandwichNorms | None, vector: Vector, merged: LoadMerged
) -> GpuLayerInput | None:
    """Loads and returns the weights that add layer `index`'s own input to the residual; None for a model whose layers
    have no such inputs. norms: the norms of the layer, which is always sandwiched."""
    if not shape.layer_input_width:
        return None
    assert norms is not None
    (gate,), (output,) = (
        merged(n.of_layer(index, part)) for part in (n.LAYER_INPUT_GATE, n.LAYER_INPUT_PROJ)
    )
    has_factor = shape.loaded_layers[index].has_factor
    factor = vector(n.of_layer(index, n.LAYER_OUTPUT_SCALE)) if has_factor else None
    norm = vector(n.of_layer(index, n.LAYER_INPUT_NORM))
    return GpuLayerInput(
        gate, output, replace(norms, output=norm, parts=None, factor=factor, post_norm_eps=None)
    )

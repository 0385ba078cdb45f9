"""Loads the next-token block to a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moeserve.kernels.planes import Planes
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_weights import GpuLayer, GpuNextToken
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.sources.gguf import names as n


def load_next_token(
    shape: ModelShape,
    vector: Callable[[str], Tensor],
    planes: Callable[[str], Planes],
    layer: Callable[[int, Sequence[int]], GpuLayer],
) -> GpuNextToken | None:
    """Returns the model's next-token block (MTP) with all its experts on the GPU; None if it does not draft. vector,
    planes: load a tensor by its full name; layer: loads a layer by its index, with these experts."""
    if shape.next_token_layer is None:
        return None
    index = shape.num_layers
    return GpuNextToken(
        token_norm=vector(n.of_layer(index, n.NEXTN_ENORM)),
        state_norm=vector(n.of_layer(index, n.NEXTN_HNORM)),
        projection=MergedLinear(planes(n.of_layer(index, n.NEXTN_EH_PROJ))),
        layer=layer(index, range(shape.next_token_layer.num_experts)),
        head_norm=vector(n.of_layer(index, shape.next_token_norm)),
    )

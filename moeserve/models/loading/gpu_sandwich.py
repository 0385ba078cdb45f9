"""Loads the norms of a sandwiched layer to a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from moeserve.kernels.norm.sandwich_norms import PartNorms, SandwichNorms
from moeserve.models.errors import SettingError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

Vector = Callable[[str], Tensor]  # loads a vector by its full name


def load_sandwich(source: ModelSource, model: ModelShape, index: int, vector: Vector) -> SandwichNorms | None:
    """Loads and returns the norms of layer `index`'s blocks; None if it is not sandwiched. If the layer has an input of
    its own, its factor is applied after that input is added: gpu_layer_inputs.py. Raises ModelError for a quantised
    router with a separate norm: only float weights are supported."""
    shape = model.loaded_layers[index]
    if not shape.is_sandwiched:
        return None
    has_parts = shape.moe is not None and shape.moe.parts_normed
    has_factor = shape.has_factor and not model.layer_input_width
    return SandwichNorms(
        attention_output=vector(n.of_layer(index, n.POST_ATTENTION_NORM)),
        input=vector(n.of_layer(index, shape.ffn_norm)) if shape.has_input_norms else None,
        output=vector(n.of_layer(index, n.POST_FFW_NORM)),
        parts=_load_part_norms(source, model, index, vector) if has_parts else None,
        factor=vector(n.of_layer(index, n.LAYER_OUTPUT_SCALE)) if has_factor else None,
        post_norm_eps=model.post_norm_eps,
    )


def _load_part_norms(source: ModelSource, model: ModelShape, index: int, vector: Vector) -> PartNorms:
    router = source.tensors[n.of_layer(index, n.FFN_GATE_INP)]
    if router.type.is_quantised:
        raise SettingError(
            source.path, f"tensor {router.name!r} is of type {router.type.name}; floats are expected"
        )
    scale = vector(n.in_layer(index, n.scale_of_part(n.FFN_GATE_INP)))
    return PartNorms(
        router_input=scale / math.sqrt(model.hidden_size),
        experts_input=vector(n.of_layer(index, n.PRE_FFW_NORM_2)),
        dense_output=vector(n.of_layer(index, n.POST_FFW_NORM_1)),
        experts_output=vector(n.of_layer(index, n.POST_FFW_NORM_2)),
    )

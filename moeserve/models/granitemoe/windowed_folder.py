"""Folders of Granite with windows: which layers have one, their RoPE bases, experts in two forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.granitemoe.dense import MAPPING as DENSE
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.expert_matrices import linear_experts_and_shared
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    integer,
    layer_flags,
    layer_types,
    number,
    windows_of,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_BIASES,
    DECODER_LAYER,
    DENSE_FFN,
    MOE_EXPERTS,
    OUTPUT_BIAS,
)
from moeserve.models.sources.huggingface.remade import stored_as, together

LAYER_THETAS: Final = "rope.freq_base_by_layer"  # no GGUF has this key: `layer_rope_theta`
PERIOD: Final = 4  # layers, of which the first has no window, where config.json does not say which
_MOE: Final = "granitemoe_swa"
_UNDER: Final = "block_sparse_moe."
_ROUTER: Final = n.of_part(n.FFN_GATE_INP)
_EXPERTS: Final = {
    "expert_count": ("num_local_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_shared_feed_forward_length": ("shared_intermediate_size",),
}
_BIASES: Final = DECODER_BIASES | OUTPUT_BIAS


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, experts, which layers have a window, and their RoPE bases. Raises
    ModelError."""
    layers = integer(path, config, "num_hidden_layers")
    kinds = layer_types(path, config, layers) or [
        SLIDING if layer % PERIOD else FULL for layer in range(layers)
    ]
    values = windows_of(kinds) | _thetas(path, config, layers)
    if SLIDING in kinds:
        values[n.SLIDING_WINDOW] = integer(path, config, "sliding_window", 128)
    if config.get("model_type") != _MOE:
        return values | dict.fromkeys(_EXPERTS, 0)
    for setting in ("num_local_experts", "num_experts_per_tok"):
        integer(path, config, setting)
    return values


def _thetas(path: Path, config: Mapping[str, Any], layers: int) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `layer_rope_theta`, 0 for a layer without positions.
    `no_rope_layers`, from which llama.cpp's converter reads these layers, must agree. Raises ModelError."""
    name, theirs = "layer_rope_theta", "no_rope_layers"
    given = config.get(name)
    rotates = layer_flags(path, config, layers, theirs, (0, 1))
    if given is None:
        if rotates is not None and not all(rotates):
            raise SettingError(path, f"{theirs!r} names layers without positions, and {name!r} is missing")
        return {}
    if not isinstance(given, list) or len(given) != layers:
        raise SettingError(
            path, f"{name!r} is {given!r:.80}; a number for each of {layers} layers is expected"
        )
    thetas = [number(path, {name: each}, name, 0, 1e12) for each in given]
    if rotates is not None and rotates != [each != 0 for each in thetas]:
        raise ModelError(path, f"{name!r} and {theirs!r} do not agree; leave the wrong one out")
    return {LAYER_THETAS: np.array(thetas, np.float64)}


MAPPING: Final = replace(
    DENSE,
    model_type=_MOE,
    other_model_types=("granite_swa",),
    keys={**DENSE.keys, **_EXPERTS, n.HAS_QKV_BIAS: ("attention_bias",)},
    defaults={n.HAS_QKV_BIAS: False, **dict.fromkeys(_EXPERTS, 0)},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "mlp_bias": (False, False)},
    layer=DECODER_LAYER | {n.of_part(n.ATTN_SINKS): "self_attn.sinks"} | _BIASES,
    moe={_ROUTER: f"{_UNDER}router.weight"},
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    experts_under=f"{_UNDER}experts",
    optional=frozenset(_BIASES),
    # Names from before transformers 5.
    made=together(stored_as({_ROUTER: f"{_UNDER}router.layer.weight"}), linear_experts_and_shared),
    derived=derived,
)

"""Folders of Cohere's models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    integer,
    layer_flags,
    layer_types,
    number,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    MOE_EXPERTS,
    MOE_ROUTER,
    HuggingFaceMapping,
)
from moeserve.models.sources.huggingface.next_token_names import BEHIND_LAYERS

# transformers' defaults.
PERIOD: Final = 4
THETA: Final = 1e4
LAYER_NORM_EPS: Final = 1e-5


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have windows, positions and experts, and the kind of norm, from
    config.json. Raises ModelError for a missing or unsupported setting."""
    layers = integer(path, config, "num_hidden_layers")
    leading = integer(path, config, "first_k_dense_replace", 0, low=0)
    is_dense = layer_flags(path, config, layers, "mlp_layer_types", ("sparse", "dense")) or [
        layer < leading for layer in range(layers)
    ]
    of_dense = integer(path, config, "prefix_dense_sliding_window_pattern", 1)
    types = layer_types(path, config, layers) or _types(path, config, layers, leading, of_dense)
    is_windowed = [kind == SLIDING for kind in types]
    values: dict[str, MetadataValue] = {
        n.DENSE_LAYERS: np.array(is_dense),
        n.WINDOWED_LAYERS: np.array(is_windowed),
        n.UNROTATED_LAYERS: np.array(
            [
                not (windowed or (dense and of_dense == 1))
                for windowed, dense in zip(is_windowed, is_dense, strict=True)
            ]
        ),
    }
    if any(is_windowed):
        values[n.SLIDING_WINDOW] = integer(path, config, "sliding_window")
    if any(is_dense):
        values["feed_forward_length"] = integer(
            path, config, "prefix_dense_intermediate_size", config.get("intermediate_size")
        )
    if config.get("rms_norm_eps") is not None:
        return values | {n.RMS_EPS: number(path, config, "rms_norm_eps", 1e-12, 1e-2)}
    return values | {
        n.LAYER_NORM_EPS: number(path, config, "layer_norm_eps", 1e-12, 1e-2, default=LAYER_NORM_EPS)
    }


def _types(path: Path, config: Mapping[str, Any], layers: int, leading: int, of_dense: int) -> list[str]:
    """Returns the kinds of layers without `layer_types`: the layers behind the first ones count from 0 again."""
    period = integer(path, config, "sliding_window_pattern", PERIOD)
    periods = [(index, of_dense) for index in range(leading)]
    periods += [(index, period) for index in range(layers - leading)]
    return [FULL if (index + 1) % each == 0 else SLIDING for index, each in periods]


MAPPING: Final = HuggingFaceMapping(
    model_type="cohere2_moe",
    keys={ours: theirs for ours, theirs in DECODER_KEYS.items() if ours != n.RMS_EPS}
    | {
        "expert_count": ("num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("intermediate_size",),
        "expert_weights_norm": ("norm_topk_prob",),
        "logit_scale": ("logit_scale",),
    },
    defaults={"expert_weights_norm": True},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "expert_selection_fn": ("sigmoid", "softmax"),
        "num_shared_experts": (0, 0),
        "use_qk_norm": (False, False),
        "use_parallel_block": (True, True),
        "rotary_pct": (1.0, 1.0),
    },
    derived=derived,
    rope_theta=THETA,
    tied_by_default=True,
    layer={name: theirs for name, theirs in DECODER_LAYER.items() if name != n.of_part(n.FFN_NORM)},
    moe=MOE_ROUTER,
    dense=DENSE_FFN,
    experts=MOE_EXPERTS,
    next_token=BEHIND_LAYERS,
    skipped_layers=("num_nextn_predict_layers",),
)

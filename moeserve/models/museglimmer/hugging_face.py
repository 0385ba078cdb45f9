"""Folders of Muse Glimmer, whose vision is left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.head_norms import scaled_head_norms
from moeserve.models.sources.huggingface.layer_settings import (
    FULL,
    SLIDING,
    integer,
    layer_types,
    number,
    windows_of,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
)

# transformers' defaults, of which a GGUF states neither the second nor the third.
PERIOD: Final = 4  # layers, counted from the last, of which one has no window
BEHIND_EPS: Final = 1e-8
Q_SCALE: Final = 3.87
LOGIT_SCALE: Final = 0.19611613513818404
LOGIT_CAP: Final = 20.0
WINDOW: Final = 2048
_OF_Q: Final = "attention.q_scale"  # no GGUF has this key


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have a window, and q's scale, from config.json. Raises ModelError,
    also if a layer with a window has no positions, or one without has some."""
    layers = integer(path, config, "num_hidden_layers")
    types = layer_types(path, config, layers) or [
        SLIDING if (layers - 1 - layer) % PERIOD else FULL for layer in range(layers)
    ]
    thetas = config.get("layer_rope_theta")
    if thetas is not None and (
        not isinstance(thetas, list) or [bool(each) for each in thetas] != [each == SLIDING for each in types]
    ):
        raise SettingError(
            path, f"'layer_rope_theta' is {thetas!r:.80}; 0 in the layers without a window alone is supported"
        )
    return windows_of(types) | {
        _OF_Q: number(path, config, "qk_scale_factor", 1e-6, 1e6, default=Q_SCALE),
        "logit_scale": number(path, config, "output_multiplier", 1e-6, 1e6, default=LOGIT_SCALE),
        "final_logit_softcapping": number(
            path, config, "final_logit_softcapping", 1e-3, 1e6, default=LOGIT_CAP
        ),
    }


_NORMS: Final = {
    n.of_part(n.ATTN_NORM): "input_layernorm.weight",
    n.of_part(n.POST_ATTENTION_NORM): "post_attention_layernorm.weight",
    n.of_part(n.FFN_NORM): "pre_feedforward_layernorm.weight",
    n.of_part(n.POST_FFW_NORM): "post_feedforward_layernorm.weight",
}

MAPPING: Final = HuggingFaceMapping(
    model_type="muse_glimmer_text",
    wrapped_in="muse_glimmer",
    keys=DECODER_KEYS
    | {"feed_forward_length": ("intermediate_size",), n.SLIDING_WINDOW: ("sliding_window",)},
    defaults={n.SLIDING_WINDOW: WINDOW},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_activation": ("silu", "silu"),
        "attention_bias": (False, False),
        "post_norm_eps": (BEHIND_EPS, BEHIND_EPS),
    },
    layer=DECODER_LAYER | DENSE_FFN | _NORMS | {n.of_part(n.ATTN_GATE): "self_attn.gate_proj.weight"},
    less_one=frozenset(_NORMS),
    derived=derived,
    rope_theta=1e4,
    made_of_none=scaled_head_norms(_OF_Q),
    metadata={n.ROPE_HALVES: True},
)

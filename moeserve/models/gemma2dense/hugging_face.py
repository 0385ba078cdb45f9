"""Folders of Gemma 2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import (
    number,
    windows_by_period,
)
from moeserve.models.sources.huggingface.mapping import (
    DECODER_KEYS,
    DECODER_LAYER,
    DENSE_FFN,
    HuggingFaceMapping,
)

PERIOD: Final = 2  # layers, of which the last has no window
# transformers' defaults, which are llama.cpp's as well.
WINDOW: Final = 4096
SCORE_CAP: Final = 50.0
LOGIT_CAP: Final = 30.0
THETA: Final = 1e4


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, which layers have a window, the scale of scores, and the caps, where null means
    none, from config.json. Raises ModelError for a missing or unsupported setting."""
    caps = (("attn_logit_softcapping", SCORE_CAP), ("final_logit_softcapping", LOGIT_CAP))
    return (
        windows_by_period(path, config, PERIOD)
        | {
            "attention.scale": number(path, config, "query_pre_attn_scalar", 1e-3, 1e6, default=256.0)
            ** -0.5,
        }
        | {
            name: number(path, {name: config.get(name, cap)}, name, 0.0, 1e6, default=0.0)
            for name, cap in caps
        }
    )


_NORMS: Final = {
    n.of_part(n.ATTN_NORM): "input_layernorm.weight",
    n.of_part(n.POST_ATTENTION_NORM): "post_attention_layernorm.weight",
    n.of_part(n.FFN_NORM): "pre_feedforward_layernorm.weight",
    n.of_part(n.POST_FFW_NORM): "post_feedforward_layernorm.weight",
}

MAPPING: Final = HuggingFaceMapping(
    model_type="gemma2",
    keys=DECODER_KEYS
    | {"feed_forward_length": ("intermediate_size",), n.SLIDING_WINDOW: ("sliding_window",)},
    defaults={n.SLIDING_WINDOW: WINDOW},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        **dict.fromkeys(("attention_bias", "use_bidirectional_attention"), (False, False)),
    },
    layer=DECODER_LAYER | DENSE_FFN | _NORMS,
    less_one=frozenset(_NORMS) | {n.OUTPUT_NORM},
    derived=derived,
    rope_theta=THETA,
    tied_by_default=True,
)

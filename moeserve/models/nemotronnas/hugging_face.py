"""Folders of Llama-Nemotron Super and Ultra: `block_configs` says which parts each layer has, in the settings of
NVIDIA's code beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.config_json import rope_of
from moeserve.models.sources.huggingface.layer_settings import integer, number
from moeserve.models.sources.huggingface.llama3_rope import is_llama3, llama3_rope, rope_factors
from moeserve.models.sources.huggingface.mapping import (
    DECODER_LAYER,
    DENSE_FFN,
    LAYERWISE_DECODER_KEYS,
    HuggingFaceMapping,
)

HEADS: Final = "attention.head_count"
KV_HEADS: Final = "attention.head_count_kv"
WIDTHS: Final = "feed_forward_length"
THETA: Final = 1e4  # transformers' default
_MULTIPLE: Final = 256  # of feed-forwards' widths
# Settings of a block that change the computation, of which other values than none are refused.
_CHANGING: Final = ("replace_with_linear", "window_length", "num_sink_tokens", "unshifted_sink")


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, config.json's `block_configs`: heads, KV heads and width of the feed-forward of each
    layer. Raises ModelError for a missing or unsupported setting."""
    layers = integer(path, config, "num_hidden_layers")
    hidden, heads = integer(path, config, "hidden_size"), integer(path, config, "num_attention_heads")
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise SettingError(
            path, f"'block_configs' is {blocks!r:.80}; one of each of {layers} layers is expected"
        )
    if hidden % heads:
        raise SettingError(path, f"'num_attention_heads' is {heads}; it must divide 'hidden_size', {hidden}")
    attention = [_part(path, block, "attention") for block in blocks]
    groups = [integer(path, each, "n_heads_in_group") if each else 0 for each in attention]
    uneven = next((each for each in groups if each and heads % each), None)
    if uneven is not None:
        raise SettingError(path, f"'n_heads_in_group' is {uneven}; it must divide the {heads} heads")
    ffns = [_part(path, block, "ffn") for block in blocks]
    multiples = [number(path, each, "ffn_mult", 1e-3, 1024) if each else 0.0 for each in ffns]
    return {
        "attention.key_length": hidden // heads,
        HEADS: np.array([heads if each else 0 for each in groups], np.int64),
        KV_HEADS: np.array([heads // each if each else 0 for each in groups], np.int64),
        WIDTHS: np.array([_width(each, hidden) for each in multiples], np.int64),
    }


def _part(path: Path, block: object, name: str) -> dict[str, Any] | None:
    """Returns the settings of a block's attention or feed-forward; None if the layer has none. Raises ModelError."""
    settings = block.get(name) if isinstance(block, dict) else None
    if not isinstance(settings, dict) or not settings:
        raise SettingError(path, f"{name!r} of 'block_configs' is {settings!r:.80}; an object is expected")
    changing = next((each for each in _CHANGING if settings.get(each)), None)
    if changing is not None:
        value = settings[changing]
        raise SettingError(path, f"{changing!r} of 'block_configs' is {value!r:.80}, which is not supported")
    return None if settings.get("no_op") else settings


def _width(multiple: float, hidden: int) -> int:
    return -(-int(2 * multiple * hidden / 3) // _MULTIPLE) * _MULTIPLE


def rope(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, RoPE's settings, including Llama 3's type. Raises ModelError for a missing or
    unsupported setting."""
    return llama3_rope(path, config, THETA) if is_llama3(config) else rope_of(path, config, MAPPING)


MAPPING: Final = HuggingFaceMapping(
    model_type="nemotron-nas",
    keys={ours: theirs for ours, theirs in LAYERWISE_DECODER_KEYS.items() if ours != HEADS},
    # setting: (the only supported value, transformers' default)
    fixed={"hidden_act": ("silu", "silu"), "attention_bias": (False, False), "mlp_bias": (False, False)},
    layer=DECODER_LAYER | DENSE_FFN,
    optional=frozenset(DECODER_LAYER | DENSE_FFN),  # the shape says which layers have which
    derived=derived,
    rope=rope,
    rope_theta=THETA,
    made_of_none=rope_factors,
    metadata={n.ROPE_HALVES: True},
)

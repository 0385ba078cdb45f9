"""Folders of Falcon-H1. The multipliers of activations are multiplied into the matrices before or after them, as in
GGUF files, and the results are rounded to the stored type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.layer_settings import integer, number
from moeserve.models.sources.huggingface.mamba2 import (
    MAMBA2_KEYS,
    check_mamba2,
    mamba2_names,
    mamba2_rules,
)
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS, DECODER_LAYER, HuggingFaceMapping
from moeserve.models.sources.huggingface.multipliers import multiplied, multiplier_keys
from moeserve.models.sources.huggingface.remade import made_by, together

_LEAST, _MOST = 1e-6, 1e6  # of a multiplier
_PIECES: Final = 5  # of Mamba-2's rows: z, x, B, C and dt

_UNDER: Final = "mamba."
NORMALIZED: Final = "ssm.normalized"  # key of what config.json says, for a comparison with the tensors
# Matrices that take over multipliers -> the settings whose product each takes over.
SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    n.ATTN_Q: ("attention_in_multiplier",),
    n.ATTN_K: ("attention_in_multiplier", "key_multiplier"),
    n.ATTN_V: ("attention_in_multiplier",),
    n.ATTN_OUTPUT: ("attention_out_multiplier",),
    n.SSM_IN: ("ssm_in_multiplier",),
    n.SSM_OUT: ("ssm_out_multiplier",),
}
NAMES: Final = (
    DECODER_LAYER
    | mamba2_names(_UNDER)
    | {
        n.of_part(n.FFN_NORM): "pre_ff_layernorm.weight",
        n.of_part(n.FFN_GATE): "feed_forward.gate_proj.weight",
        n.of_part(n.FFN_UP): "feed_forward.up_proj.weight",
        n.of_part(n.FFN_DOWN): "feed_forward.down_proj.weight",
    }
)
MULTIPLIED: Final = {part: NAMES[n.of_part(part)] for part in (*SETTINGS, n.FFN_GATE, n.FFN_DOWN)}


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, Mamba-2's heads and the multipliers. Raises ModelError for a missing or unsupported
    setting."""
    heads = integer(path, config, "mamba_n_heads", 128)
    width = integer(path, config, "mamba_d_ssm", 1024)
    of_head = config.get("mamba_d_head", "auto")
    if width % heads or of_head not in ("auto", width // heads):
        raise SettingError(
            path, f"'mamba_d_head' is {of_head!r:.80}; {heads} heads of {width} numbers do not have it"
        )
    factors = {part: _product(path, config, settings) for part, settings in SETTINGS.items()}
    gate, down = _numbers(path, config, "mlp_multipliers", 2)
    multipliers = [
        multiplier_keys(part, [each])
        for part, each in (factors | {n.FFN_GATE: gate, n.FFN_DOWN: down}).items()
    ]
    of_pieces = _numbers(path, config, "ssm_multipliers", _PIECES)
    keys = integer(path, config, "mamba_n_groups", 1) * integer(path, config, "mamba_d_state", 256)
    multipliers.append(
        multiplier_keys(
            n.SSM_IN, [factors[n.SSM_IN] * each for each in of_pieces], [width, width, keys, keys]
        )
    )
    return {
        "ssm.time_step_rank": heads,
        "ssm.inner_size": width,
        NORMALIZED: bool(config.get("mamba_rms_norm", False)),
        "embedding_scale": number(path, config, "embedding_multiplier", _LEAST, _MOST, default=1.0),
        "logit_scale": number(path, config, "lm_head_multiplier", _LEAST, _MOST, default=1.0),
        **{key: value for each in multipliers for key, value in each.items()},
    }


def _product(path: Path, config: Mapping[str, Any], settings: tuple[str, ...]) -> float:
    return float(
        np.prod([number(path, config, each, _LEAST, _MOST, default=1.0) for each in settings], dtype=float)
    )


def _numbers(path: Path, config: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Returns the numbers of a list; ones if config.json has none. Raises ModelError."""
    given = config.get(name)
    values = [1.0] * count if given is None else given
    if not isinstance(values, list) or len(values) != count:
        raise SettingError(path, f"{name!r} is {given!r:.80}; {count} numbers are expected")
    return [number(path, {name: each}, name, _LEAST, _MOST) for each in values]


def check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for limited time steps, layers without attention, and a norm before the gate."""
    check_mamba2(path, config)
    if config.get("attn_layer_indices") is not None:
        raise SettingError(
            path,
            f"'attn_layer_indices' is {config['attn_layer_indices']!r:.80}; attention in all layers is supported",
        )
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise SettingError(path, "'mamba_norm_before_gate' is true; only a norm behind the gate is supported")


MAPPING: Final = HuggingFaceMapping(
    model_type="falcon_h1",
    keys=DECODER_KEYS
    | {key: names[1:] for key, names in MAMBA2_KEYS.items()}
    | {"feed_forward_length": ("intermediate_size",)},
    # setting: (the only supported value, transformers' default)
    fixed={
        "hidden_act": ("silu", "silu"),
        "mamba_conv_bias": (True, True),
        **dict.fromkeys(("attention_bias", "projectors_bias", "mlp_bias", "mamba_proj_bias"), (False, False)),
    },
    layer=NAMES,
    optional=frozenset({n.of_part(n.SSM_NORM)}),
    made=together(multiplied(MULTIPLIED), made_by(*mamba2_rules(_UNDER))),
    renamed={"model.final_layernorm.": "model.norm."},
    quantization=frozenset(),  # multipliers would have to go to the scales
    derived=derived,
    check=check,
)

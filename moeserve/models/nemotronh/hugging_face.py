"""Folders of Nemotron-H and Nemotron 3: `backbone.*` tensors, and the kinds of layers by letters or by names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface.mamba2 import (
    MAMBA2_KEYS,
    check_mamba2,
    mamba2_names,
    mamba2_rules,
    mamba2_sizes,
)
from moeserve.models.sources.huggingface.mapping import DECODER_KEYS, GROUPED_ROUTER_KEYS, HuggingFaceMapping
from moeserve.models.sources.huggingface.next_token_names import WITH_FINAL_NORM
from moeserve.models.sources.huggingface.remade import made_by
from moeserve.models.sources.huggingface.rope_by_kind import no_rope

MAMBA, ATTENTION, EXPERTS, DENSE = "M", "*", "E", "-"  # as `hybrid_override_pattern` has them
KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mamba", "linear_attention"), MAMBA),
    **dict.fromkeys(("attention", "full_attention"), ATTENTION),
    "moe": EXPERTS,
    "mlp": DENSE,
}


def _kinds(path: Path, config: Mapping[str, Any]) -> str:
    """Returns a letter for each layer. Raises ModelError."""
    names = config.get("layers_block_type")
    if isinstance(names, list) and names and all(name in KINDS for name in names):
        return "".join(KINDS[name] for name in names)
    letters = config.get("hybrid_override_pattern")
    if names is not None or not isinstance(letters, str) or not letters or set(letters) - set(KINDS.values()):
        key, value = ("hybrid_override_pattern", letters) if names is None else ("layers_block_type", names)
        raise SettingError(
            path,
            f"{key!r} is {value!r}; layers of the kinds {', '.join(KINDS)} are expected, or letters M*E-",
        )
    return letters


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, what config.json says of the layers: each one's KV heads and feed-forward width, and
    the sizes of experts and Mamba-2. Raises ModelError for a missing or unsupported setting."""
    kinds = _kinds(path, config)

    def of_kind(kind: str, key: str) -> int:
        value = config.get(key, 0) if kind in kinds else 0
        if not isinstance(value, int):
            raise SettingError(path, f"{key!r} is {value!r}; a number is expected")
        return value

    widths = {EXPERTS: of_kind(EXPERTS, "moe_intermediate_size"), DENSE: of_kind(DENSE, "intermediate_size")}
    heads = of_kind(ATTENTION, "num_key_value_heads")
    values: dict[str, MetadataValue] = {
        "block_count": len(kinds),
        "attention.head_count_kv": np.array([heads if kind == ATTENTION else 0 for kind in kinds], np.int32),
        "feed_forward_length": np.array([widths.get(kind, 0) for kind in kinds], np.int32),
        n.DENSE_LAYERS: np.array([kind != EXPERTS for kind in kinds]),
        "expert_feed_forward_length": widths[EXPERTS],
        "expert_count": of_kind(EXPERTS, "n_routed_experts"),
        "expert_used_count": of_kind(EXPERTS, "num_experts_per_tok"),
        "expert_shared_feed_forward_length": of_kind(EXPERTS, "moe_shared_expert_intermediate_size"),
    }
    if config.get("moe_latent_size"):
        values["moe_latent_size"] = of_kind(EXPERTS, "moe_latent_size")
    return values | mamba2_sizes(path, config, "mamba_num_heads", "mamba_head_dim")


_UNDER: Final = "mixer."
ATTENTION_NAMES: Final = {
    n.of_part(n.ATTN_Q): "mixer.q_proj.weight",
    n.of_part(n.ATTN_K): "mixer.k_proj.weight",
    n.of_part(n.ATTN_V): "mixer.v_proj.weight",
    n.of_part(n.ATTN_OUTPUT): "mixer.o_proj.weight",
}
MOE_NAMES: Final = {
    n.of_part(n.FFN_GATE_INP): "mixer.gate.weight",
    n.bias_of_part(n.EXP_PROBS_B): "mixer.gate.e_score_correction_bias",
    n.of_part(n.FFN_UP_SHEXP): "mixer.shared_experts.up_proj.weight",
    n.of_part(n.FFN_DOWN_SHEXP): "mixer.shared_experts.down_proj.weight",
    n.of_part(n.FFN_LATENT_DOWN): "mixer.fc1_latent_proj.weight",
    n.of_part(n.FFN_LATENT_UP): "mixer.fc2_latent_proj.weight",
}
DENSE_NAMES: Final = {
    n.of_part(n.FFN_UP): "mixer.up_proj.weight",
    n.of_part(n.FFN_DOWN): "mixer.down_proj.weight",
}
MIXERS: Final = ATTENTION_NAMES | mamba2_names(_UNDER)
EPS: Final = "attention.layer_norm_rms_epsilon"

SECOND_NORM: Final = "second_norm.weight"  # our name of the norm of a next-token block's experts
# The block's two layers, in the names of one.
NEXT_TOKEN: Final = replace(
    WITH_FINAL_NORM,
    prefixes=("mtp.layers.0.", "mtp."),
    renamed={"layers.1.norm.weight": SECOND_NORM, "layers.1.": ""},
)

MAPPING: Final = HuggingFaceMapping(
    model_type="nemotron_h",
    keys={key: names for key, names in DECODER_KEYS.items() if key != "block_count"}
    | GROUPED_ROUTER_KEYS
    | MAMBA2_KEYS
    | {EPS: ("layer_norm_epsilon", "norm_eps"), "attention.key_length": ("head_dim", "attention_head_dim")},
    defaults={"expert_weights_norm": True},
    # setting: (the only supported value, transformers' default)
    fixed={
        "mlp_hidden_act": ("relu2", "relu2"),
        "mamba_hidden_act": ("silu", "silu"),
        "use_conv_bias": (True, True),
        "sliding_window": (None, None),
        **dict.fromkeys(("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"), (False, False)),
    },
    layer=MIXERS | {n.of_part(n.ATTN_NORM): "norm.weight", n.of_part(n.FFN_NORM): SECOND_NORM},
    moe=MOE_NAMES,
    dense=DENSE_NAMES,
    experts={n.of_part(n.FFN_UP_EXPS): "up_proj.weight", n.of_part(n.FFN_DOWN_EXPS): "down_proj.weight"},
    experts_under="mixer.experts",
    optional=frozenset({n.of_part(n.FFN_NORM), *MIXERS, *MOE_NAMES, *DENSE_NAMES}),
    renamed={
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.",
        "backbone.": "model.",
    },
    made=made_by(*mamba2_rules(_UNDER)),
    next_token=NEXT_TOKEN,
    skipped=("mtp.",),
    derived=derived,
    rope=no_rope,
    check=check_mamba2,
)

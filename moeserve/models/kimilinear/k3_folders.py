"""Folders of Kimi-K3 as they are published: the text model within a model that sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moeserve.models.errors import SettingError
from moeserve.models.kimilinear import hugging_face as kimi_linear
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.huggingface import latent
from moeserve.models.sources.huggingface.layer_settings import integer, number
from moeserve.models.sources.huggingface.remade import (
    Made,
    decay_rate,
    delta_convolutions,
    made_by,
    multiplied,
    named_by_kind,
    outside,
    together,
)

_UNDER: Final = "self_attn."
_MOE: Final = "block_sparse_moe."
# Names of the scores' two weights, without the ends.
_RESIDUALS: Final = {n.HC_ATTN: "self_attention_res", n.HC_FFN: "mlp_res"}
_OF_HEAD: Final = {n.OUTPUT_HC: "model.output_attn_res"}


def derived(path: Path, config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Returns, as GGUF's metadata, what Kimi-Linear has too, decays, the activation, and the sizes of experts and
    residuals. Raises ModelError for a missing or unsupported setting."""
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict) or linear.get("use_full_rank_gate") is not True:
        raise SettingError(
            path, "'use_full_rank_gate' of 'linear_attn_config' is not true; only true is supported"
        )
    values = kimi_linear.derived(path, config) | {
        "attn_res.block_size": _optional(path, config, "attn_res_block_size"),
        "expert_latent_length": _optional(path, config, "routed_expert_hidden_size"),
        "activation.situ_beta": number(path, config, "activation_situ_beta", 1e-3, 1e6),
    }
    if config.get("activation_situ_linear_beta") is not None:
        name = "activation_situ_linear_beta"
        values["activation.situ_linear_beta"] = number(path, config, name, 1e-3, 1e6)
    if linear.get("gate_lower_bound") is not None:
        values["kda.gate_lower_bound"] = number(path, linear, "gate_lower_bound", -1e3, -1e-3)
    return values


def _optional(path: Path, config: Mapping[str, Any], name: str) -> int:
    """Returns the setting; 0 if it is missing or null."""
    return 0 if config.get(name) is None else integer(path, config, name)


def _scores(names: Mapping[str, str]) -> Made:
    """Yields each block's score: the weight of the streams' norm times that of the product."""
    rules = {
        n.of_part(n.RES_SCORES[block]): (f"{theirs}_norm.weight", f"{theirs}_proj.weight")
        for block, theirs in names.items()
    }
    return multiplied(rules)


MIXERS: Final = {
    name: theirs
    for name, theirs in kimi_linear.MIXERS.items()
    if name not in map(n.of_part, (n.SSM_G_A, n.SSM_G_B))
}
LATENT: Final = {
    n.of_part(n.FFN_ROUTED_DOWN): f"{_MOE}routed_expert_down_proj.weight",
    n.of_part(n.FFN_ROUTED_UP): f"{_MOE}routed_expert_up_proj.weight",
    n.of_part(n.FFN_ROUTED_NORM): f"{_MOE}routed_expert_norm.weight",
}
_PLAIN: Final = kimi_linear.MAPPING

MAPPING: Final = replace(
    _PLAIN,
    model_type="kimi_k3",
    keys={**_PLAIN.keys, n.LATENT_NORMED: ("latent_moe_use_norm",)},
    wrapped_in="kimi_k3",
    inner_model_types=("kimi_linear",),
    fixed={
        **_PLAIN.fixed,
        "hidden_act": ("situ", "silu"),
        "mla_use_output_gate": (True, False),
        "topk_method": ("noaux_tc", "noaux_tc"),
        "rope_scaling": (None, None),
    },
    layer=MIXERS | {name: theirs for name, theirs in _PLAIN.layer.items() if "norm" in theirs},
    moe=dict(_PLAIN.moe) | LATENT,
    optional=_PLAIN.optional | frozenset(LATENT),
    made=together(
        named_by_kind(f"{_UNDER}g_proj.weight", f"{_UNDER}A_log", n.of_part(n.SSM_G), n.of_part(n.ATTN_GATE)),
        latent.made_tensors,
        made_by(*delta_convolutions(_UNDER), decay_rate(n.SSM_A, f"{_UNDER}A_log", 1)),
        _scores(_RESIDUALS),
    ),
    made_outside=outside(_scores(_OF_HEAD)),
    derived=derived,
)

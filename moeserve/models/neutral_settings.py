"""Metadata keys that change the computation of some architectures, with the values that change nothing.

A family reads the settings of its network. If a file has one of these keys with another value, and the family has
not read it, the model would be computed wrongly, so it is refused.
"""

from __future__ import annotations

from typing import Final

import numpy as np

NEUTRAL: Final[dict[str, tuple[float | bool, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "moe_latent_size": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "use_parallel_residual": (False,),
}


def is_neutral(suffix: str, value: object) -> bool:
    """Returns whether the value, or each entry of an array with one per layer, changes nothing."""
    values = value.tolist() if isinstance(value, np.ndarray) else [value]
    return all(each in NEUTRAL[suffix] for each in values)

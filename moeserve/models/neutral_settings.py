"""Metadata keys that change the computation of some architectures, with the values that change nothing.

A family reads the settings of its network. If a file has one of these keys with another value, and the family has
not read it, the model would be computed wrongly, so it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

NEUTRAL: Final[dict[str, tuple[float | bool | str, ...]]] = {
    "activation_sparsity_scale": (0,),
    "altup.num_inputs": (0,),
    "attention.causal": (True,),
    "attention.chunk_size": (0,),
    "attention.clamp_kqv": (0,),
    "attention.decay_lora_rank": (0,),
    "attention.gate_lora_rank": (0,),
    "attention.group_norm_groups": (0,),
    "attention.iclr_lora_rank": (0,),
    "attention.key_length_mla": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_group_count": (0,),
    "attention.output_lora_rank": (0,),
    "attention.output_scale": (0, 1),
    "attention.q_lora_rank": (0,),
    "attention.relative_buckets_count": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window_pattern": (0, 1),  # every layer is the last of its period, or none has a window
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_length_mla": (0,),
    "attention.value_residual_mix_lora_rank": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "classifier.output_labels": (),
    "decoder_block_count": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_chunk_feed_forward_length": (0,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # unset, softmax
    "expert_group_count": (0, 1),
    "expert_group_scale": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "experts_per_group": (0,),
    "final_logit_softcapping": (0,),
    "full_attention_interval": (0, 1),
    "hash_layer_count": (0,),
    "hidden_activation": ("silu", "swish"),
    "hyper_connection.count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "kda.head_dim": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "moe_latent_size": (0,),
    "norm_before_residual": (False,),
    "rescale_every_n_layers": (0,),
    "residual_scale": (0, 1),
    "rope.freq_scale_swa": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "shortconv.l_cache": (0,),
    "ssm.conv_kernel": (0,),
    "ssm.dt_b_c_rms": (False,),
    "ssm.group_count": (0,),
    "ssm.inner_size": (0,),
    "ssm.state_size": (0,),
    "ssm.time_step_rank": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "swin_norm": (False,),
    "tensor_data_layout": (),
    "time_decay_extra_dim": (0,),
    "time_mix_extra_dim": (0,),
    "token_shift_count": (0,),
    "use_parallel_residual": (False,),
    "wkv.head_size": (0,),
}
# A key that other architectures read for layers with windows -> the key for all layers, which it must equal.
OF_WINDOWS: Final = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
WINDOW: Final = "attention.sliding_window"
PATTERN: Final = "attention.sliding_window_pattern"
# Of a shared expert families read the width or the number; the tensors' shapes are checked against either.
SHARED: Final = frozenset({"expert_shared_count", "expert_shared_feed_forward_length"})


def is_neutral(suffix: str, value: object) -> bool:
    """Returns whether the value, or each entry of an array with one per layer, changes nothing."""
    values = value.tolist() if isinstance(value, np.ndarray) else [value]
    return all(each in NEUTRAL[suffix] for each in values)


def first_overlooked(
    given: Mapping[str, object], read: Collection[str], context_length: int, *, has_windows: bool
) -> str | None:
    """Returns the first key that changes the computation of some architecture and that the family has not read; None
    without one. given: values under keys without the architecture. read: keys that the family has read. has_windows:
    some layer has one."""
    known = {*read, *SHARED} if SHARED & set(read) else set(read)
    for suffix in sorted(given.keys() & NEUTRAL.keys() - known):
        if not is_neutral(suffix, given[suffix]):
            return suffix
    for suffix in sorted(given.keys() & OF_WINDOWS.keys() - known):
        if has_windows and repr(given[suffix]) != repr(given.get(OF_WINDOWS[suffix])):
            return suffix
    # A window as long as the context hides nothing; the pattern says which layers have one, maybe none.
    window = given.get(WINDOW, 0)
    is_open = window == 0 or (isinstance(window, int) and window >= context_length)
    return None if is_open or WINDOW in known or PATTERN in given else WINDOW

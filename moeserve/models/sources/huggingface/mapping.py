"""Describes how a family's checkpoints in Hugging Face's layout are read: maps config.json's keys and the tensor names
to GGUF's.

A setting that transformers' code of the model uses and that this code does not know is refused, because ignoring it
would silently change every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

from .made_tensor import MadeTensor
from .next_token_names import NextTokenNames
from .quantization_config import METHODS, quantization_of
from .safetensors_file import StoredTensor

HEAD_DIM = "attention.key_length"
# Keys that may be missing, as in a GGUF: the shape reader has a default. HEAD_DIM's is hidden_size /
# num_attention_heads.
DEFAULTED = frozenset(
    {
        HEAD_DIM,
        "full_attention_interval",
        "leading_dense_block_count",
        "expert_shared_count",
        "attention.q_lora_rank",
        n.LATENT_NORMED,
    }
)


@dataclass(frozen=True, slots=True)
class HuggingFaceMapping:
    model_type: str  # config.json's `model_type`
    keys: Mapping[str, tuple[str, ...]]  # GGUF key without the architecture -> names in config.json
    # config.json key -> (the only supported value, transformers' default).
    fixed: Mapping[str, tuple[Any, Any]]
    layer: Mapping[str, str]  # GGUF name within a layer -> checkpoint's after "model.layers.N."
    moe: Mapping[str, str] = field(default_factory=dict)  # the same, only in layers with experts
    dense: Mapping[str, str] = field(
        default_factory=dict
    )  # only in layers without: n.DENSE_LAYERS, or the first
    # Key of `keys` -> transformers' default.
    defaults: Mapping[str, bool | int | float] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)  # of one expert, after "<experts_under>.E."
    experts_under: str = "mlp.experts"  # after "model.layers.N."
    outside: Mapping[str, str] = field(
        default_factory=dict
    )  # of tensors in no layer, besides those of all families
    optional: frozenset[str] = frozenset()  # GGUF names of tensors that may be missing
    # Prefix, after "model.layers.N.", of experts stored as one tensor with alternating rows of gate and up, and one
    # of down.
    interleaved_experts: str | None = None
    # Makes a layer's tensors from others. Arguments: the folder, "model.layers.N.", the metadata, and the stored
    # tensors, from which it removes those it uses. Raises ModelError.
    made: (
        Callable[[Path, str, Metadata, dict[str, StoredTensor]], Iterator[tuple[str, MadeTensor]]] | None
    ) = None
    # Makes tensors outside the layers from stored ones, which it removes. Arguments: the folder, the metadata, and the
    # stored tensors. Raises ModelError.
    made_outside: (
        Callable[[Path, Metadata, dict[str, StoredTensor]], Iterator[tuple[str, MadeTensor]]] | None
    ) = None
    # Makes tensors outside the layers from the metadata.
    made_of_none: Callable[[Metadata], Iterator[tuple[str, MadeTensor]]] | None = None
    # A matrix of q, k and v within a layer, without `.weight`, that may have been quantised in parts: ranked_qkv.py.
    ranked_qkv: str | None = None
    # Prefixes of the names of tensors that see or hear, which are left out.
    left_out: tuple[str, ...] = ()
    # GGUF names, within a layer or outside, of norms that are stored minus 1.
    less_one: frozenset[str] = frozenset()
    # Names of the next-token block that drafts, where a checkpoint has one.
    next_token: NextTokenNames | None = None
    # Prefixes of the names of other next-token (MTP) tensors, which are not loaded.
    skipped: tuple[str, ...] = ()
    quantization: frozenset[str] = METHODS  # supported values of quant_method
    # A further check of config.json, given with its path. Raises ModelError.
    check: Callable[[Path, Mapping[str, Any]], None] | None = None
    # Derives GGUF keys, without the architecture, that depend on several settings of config.json, given with its
    # path. Raises ModelError.
    derived: Callable[[Path, Mapping[str, Any]], dict[str, MetadataValue]] | None = None
    # Derives RoPE's keys, instead of config_json.py.
    rope: Callable[[Path, Mapping[str, Any]], dict[str, MetadataValue]] | None = None
    # Settings of YaRN, besides those that all families have, which `derived` reads.
    rope_settings: frozenset[str] = frozenset()
    other_model_types: tuple[str, ...] = ()  # further model types that are read in the same way
    # Values of `architectures` without which this family is not meant, as another one has the same model_type.
    architectures: tuple[str, ...] = ()
    # GGUF keys, without the architecture, that no config.json states.
    metadata: Mapping[str, bool] = field(default_factory=dict)
    rotates_in_sections: bool = False  # mrope_section; a text's positions are equal in all sections
    sections_in_blocks: bool = False  # ModelShape.sections_in_blocks
    rotates_part: bool = False  # partial_rotary_factor or rotary_dim tells how much of each head
    # config.json's names for the number of next-token layers, which follow num_hidden_layers.
    skipped_layers: tuple[str, ...] = ()
    # Prefixes of stored names -> those that are read, for checkpoints with other names outside `layer` and `moe`.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # model_type of a config.json whose text_config has this one's: wrapped_text.py.
    wrapped_in: str | None = None
    other_wrappers: tuple[str, ...] = ()  # further such model types
    # Within these, further model types of the text_config, which mean another family elsewhere.
    inner_model_types: tuple[str, ...] = ()
    rope_theta: float | None = None  # default, if config.json has none
    tied_by_default: bool = False  # tie_word_embeddings, if config.json does not state it
    flattened: frozenset[str] = frozenset()  # GGUF names of vectors that are [1, n] in checkpoints

    def may_be_meant(self, config: Mapping[str, Any]) -> bool:
        """Returns whether config.json has one of the `architectures` that the family needs, if it needs any."""
        named = config.get("architectures")
        return not self.architectures or (
            isinstance(named, list) and any(name in named for name in self.architectures)
        )

    @property
    def model_types(self) -> tuple[str, ...]:
        """All supported values of config.json's `model_type`."""
        return *self.text_types, *self.wrappers

    @property
    def wrappers(self) -> tuple[str, ...]:
        """The values of models around the text model."""
        return *(() if self.wrapped_in is None else (self.wrapped_in,)), *self.other_wrappers

    @property
    def types_within(self) -> tuple[str, ...]:
        """The `model_type`s of the family's text models inside a multimodal model."""
        return *self.text_types, *self.inner_model_types

    @property
    def text_types(self) -> tuple[str, ...]:
        """The `model_type`s of the family's text models without a multimodal model around them."""
        return self.model_type, *self.other_model_types


# Keys that all decoders have: GGUF's key -> config.json's name, and the name that transformers 5 writes.
DECODER_KEYS: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    HEAD_DIM: ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
}
# The same for families whose heads differ by kind of layer.
LAYERWISE_DECODER_KEYS = {
    ours: theirs for ours, theirs in DECODER_KEYS.items() if ours not in (HEAD_DIM, "attention.head_count_kv")
}
MOE_KEYS: dict[str, tuple[str, ...]] = {
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
}
# Settings of routers like DeepSeek-V3's (https://arxiv.org/abs/2412.19437): groups, normalisation, scale.
GROUPED_ROUTER_KEYS: dict[str, tuple[str, ...]] = {
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
}
DECODER_LAYER: dict[str, str] = {
    n.of_part(n.ATTN_NORM): "input_layernorm.weight",
    n.of_part(n.ATTN_Q): "self_attn.q_proj.weight",
    n.of_part(n.ATTN_K): "self_attn.k_proj.weight",
    n.of_part(n.ATTN_V): "self_attn.v_proj.weight",
    n.of_part(n.ATTN_OUTPUT): "self_attn.o_proj.weight",
    n.of_part(n.FFN_NORM): "post_attention_layernorm.weight",
}
DECODER_BIASES: dict[str, str] = {
    n.bias_of_part(n.ATTN_Q): "self_attn.q_proj.bias",
    n.bias_of_part(n.ATTN_K): "self_attn.k_proj.bias",
    n.bias_of_part(n.ATTN_V): "self_attn.v_proj.bias",
}
OUTPUT_BIAS: dict[str, str] = {n.bias_of_part(n.ATTN_OUTPUT): "self_attn.o_proj.bias"}
DECODER_QK_NORMS: dict[str, str] = {
    n.of_part(n.ATTN_Q_NORM): "self_attn.q_norm.weight",
    n.of_part(n.ATTN_K_NORM): "self_attn.k_norm.weight",
}
# A layer whose norms come behind its blocks only.
BEHIND_BLOCKS: dict[str, str] = {
    name: theirs
    for name, theirs in DECODER_LAYER.items()
    if name not in map(n.of_part, (n.ATTN_NORM, n.FFN_NORM))
} | {
    **DECODER_QK_NORMS,
    n.of_part(n.POST_ATTENTION_NORM): "post_attention_layernorm.weight",
    n.of_part(n.POST_FFW_NORM): "post_feedforward_layernorm.weight",
}
DENSE_FFN: dict[str, str] = {
    n.of_part(n.FFN_GATE): "mlp.gate_proj.weight",
    n.of_part(n.FFN_UP): "mlp.up_proj.weight",
    n.of_part(n.FFN_DOWN): "mlp.down_proj.weight",
}
MOE_ROUTER: dict[str, str] = {n.of_part(n.FFN_GATE_INP): "mlp.gate.weight"}
SHARED_EXPERT: dict[str, str] = {  # with a gate
    n.of_part(n.FFN_GATE_SHEXP): "mlp.shared_expert.gate_proj.weight",
    n.of_part(n.FFN_UP_SHEXP): "mlp.shared_expert.up_proj.weight",
    n.of_part(n.FFN_DOWN_SHEXP): "mlp.shared_expert.down_proj.weight",
    n.of_part(n.FFN_GATE_INP_SHEXP): "mlp.shared_expert_gate.weight",
}
SHARED_EXPERTS: dict[str, str] = {  # as one feed-forward, without a gate
    n.of_part(n.FFN_GATE_SHEXP): "mlp.shared_experts.gate_proj.weight",
    n.of_part(n.FFN_UP_SHEXP): "mlp.shared_experts.up_proj.weight",
    n.of_part(n.FFN_DOWN_SHEXP): "mlp.shared_experts.down_proj.weight",
}
MOE_EXPERTS: dict[str, str] = {
    n.of_part(n.FFN_GATE_EXPS): "gate_proj.weight",
    n.of_part(n.FFN_UP_EXPS): "up_proj.weight",
    n.of_part(n.FFN_DOWN_EXPS): "down_proj.weight",
}


def renamed(names: Mapping[str, str], parts: Mapping[str, str]) -> dict[str, str]:
    """Returns `names` with some GGUF parts renamed, for an architecture that, say, names a norm differently."""
    ours = {n.of_part(old): n.of_part(new) for old, new in parts.items()}
    return {ours.get(name, name): theirs for name, theirs in names.items()}


def check_settings(path: Path, config: Mapping[str, Any], mapping: HuggingFaceMapping) -> None:
    """Raises ModelError for an unsupported quantisation, or a variant of the architecture that would be computed
    wrongly."""
    quantization = quantization_of(path.parent, config)
    method = None if quantization is None else quantization["quant_method"]
    if quantization is not None and not (isinstance(method, str) and method in mapping.quantization):
        raise SettingError(
            path,
            f"has a quantization_config of {method!r:.80}, which is not read; supported are GGUF files, and "
            f"checkpoints in bfloat16, float16, float32 or {', '.join(sorted(mapping.quantization))}",
        )
    for key, (supported, default) in mapping.fixed.items():
        value = default if config.get(key) is None else config[key]
        if value != supported:
            raise SettingError(path, f"{key!r} is {value!r}; only {supported!r} is supported")
    if mapping.check is not None:
        mapping.check(path, config)

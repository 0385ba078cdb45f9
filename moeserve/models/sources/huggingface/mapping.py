"""How a family's checkpoints in Hugging Face's layout are read: config.json's keys and the tensors' names, in GGUF's
language. What transformers' code of the model knows and ours does not is refused: a setting that is passed over would
quietly change every answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

from .made_tensor import MadeTensor
from .quantization_config import METHODS, quantization_of
from .safetensors_file import StoredTensor

HEAD_DIM = "attention.key_length"
# May be missing, as in a GGUF: the reader of the shape has a default. HEAD_DIM's is hidden_size / num_attention_heads.
DEFAULTED = frozenset(
    {
        HEAD_DIM,
        "full_attention_interval",
        "leading_dense_block_count",
        "expert_shared_count",
        "attention.q_lora_rank",
    }
)


@dataclass(frozen=True, slots=True)
class HuggingFaceMapping:
    model_type: str  # of config.json, which a file is named by
    keys: Mapping[str, tuple[str, ...]]  # GGUF's key without the architecture: config.json's names of it
    fixed: Mapping[str, tuple[Any, Any]]  # config.json's key: the supported value, and transformers' default
    layer: Mapping[str, str]  # GGUF's name within a layer: the checkpoint's, behind "model.layers.N."
    moe: Mapping[str, str] = field(default_factory=dict)  # the same of a layer with experts alone,
    dense: Mapping[str, str] = field(
        default_factory=dict
    )  # and of one without: n.DENSE_LAYERS, or the first ones
    # GGUF's keys of `keys`: transformers' value where config.json has none.
    defaults: Mapping[str, bool] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)  # of one expert, behind "<experts_under>.E."
    experts_under: str = "mlp.experts"  # behind "model.layers.N."
    optional: frozenset[str] = frozenset()  # GGUF's names of what a checkpoint may leave out
    # Where the experts of a layer are one tensor each of gate and up in turn, and of down: behind "model.layers.N.".
    interleaved_experts: str | None = None
    # A layer's tensors that are put together from others: of the folder, "model.layers.N.", the metadata and the
    # tensors, out of which it takes them. Raises ModelError.
    made: (
        Callable[[Path, str, Metadata, dict[str, StoredTensor]], Iterator[tuple[str, MadeTensor]]] | None
    ) = None
    # Tensors of no layer that follow from the metadata.
    made_of_none: Callable[[Metadata], Iterator[tuple[str, MadeTensor]]] | None = None
    # GGUF's names, within a layer or of none, of norms that are stored less 1.
    less_one: frozenset[str] = frozenset()
    # What the names of tensors for further tokens (MTP) begin with, which are not loaded.
    skipped: tuple[str, ...] = ()
    quantization: frozenset[str] = METHODS  # quant_method's values that are read
    # What else is to be looked at in config.json, given with its path: raises ModelError.
    check: Callable[[Path, Mapping[str, Any]], None] | None = None
    # config.json's settings, and its path, to GGUF's keys without the architecture: what follows from several settings.
    # Raises ModelError.
    derived: Callable[[Path, Mapping[str, Any]], dict[str, MetadataValue]] | None = None
    # The same of RoPE, in place of what config_json.py makes of it.
    rope: Callable[[Path, Mapping[str, Any]], dict[str, MetadataValue]] | None = None
    # YaRN's keys beside the keys that all families have: `derived` reads them.
    rope_settings: frozenset[str] = frozenset()
    other_model_types: tuple[str, ...] = ()  # that are read in the same way
    # GGUF's keys without the architecture, of what no config.json says.
    metadata: Mapping[str, bool] = field(default_factory=dict)
    rotates_in_sections: bool = False  # mrope_section: of a text, all sections have the same positions
    rotates_part: bool = False  # of each head: partial_rotary_factor, or rotary_dim, says how much
    # config.json's names of how many layers, behind num_hidden_layers, are for tokens after the next one.
    skipped_layers: tuple[str, ...] = ()
    # model_type of a config.json whose text_config is of this one: wrapped_text.py.
    wrapped_in: str | None = None
    rope_theta: float | None = None  # where config.json has none
    tied_by_default: bool = False  # tie_word_embeddings, where config.json does not say
    flattened: frozenset[str] = frozenset()  # GGUF's names of vectors that are [1, n] there

    @property
    def model_types(self) -> tuple[str, ...]:
        """The values of config.json's `model_type`, in all the forms that are read."""
        wrapped = () if self.wrapped_in is None else (self.wrapped_in,)
        return self.model_type, *self.other_model_types, *wrapped


# What decoders share: GGUF's key, config.json's, and the name that transformers 5 writes.
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
DENSE_FFN: dict[str, str] = {
    n.of_part(n.FFN_GATE): "mlp.gate_proj.weight",
    n.of_part(n.FFN_UP): "mlp.up_proj.weight",
    n.of_part(n.FFN_DOWN): "mlp.down_proj.weight",
}
MOE_ROUTER: dict[str, str] = {n.of_part(n.FFN_GATE_INP): "mlp.gate.weight"}
SHARED_EXPERT: dict[str, str] = {  # behind a gate
    n.of_part(n.FFN_GATE_SHEXP): "mlp.shared_expert.gate_proj.weight",
    n.of_part(n.FFN_UP_SHEXP): "mlp.shared_expert.up_proj.weight",
    n.of_part(n.FFN_DOWN_SHEXP): "mlp.shared_expert.down_proj.weight",
    n.of_part(n.FFN_GATE_INP_SHEXP): "mlp.shared_expert_gate.weight",
}
SHARED_EXPERTS: dict[str, str] = {  # as one, without a gate
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
    """`names` with other parts of GGUF's: a norm, say, that an architecture calls otherwise."""
    ours = {n.of_part(old): n.of_part(new) for old, new in parts.items()}
    return {ours.get(name, name): theirs for name, theirs in names.items()}


def check_settings(path: Path, config: Mapping[str, Any], mapping: HuggingFaceMapping) -> None:
    """Raises ModelError for a quantised checkpoint, or a variant of the architecture that would be computed wrongly."""
    quantization = quantization_of(path.parent, config)
    method = None if quantization is None else quantization["quant_method"]
    if quantization is not None and not (isinstance(method, str) and method in mapping.quantization):
        raise ModelError(
            path,
            f"has a quantization_config of {method!r:.80}, which is not read; supported are GGUF files, and "
            f"checkpoints in bfloat16, float16, float32 or {', '.join(sorted(mapping.quantization))}",
        )
    for key, (supported, default) in mapping.fixed.items():
        value = default if config.get(key) is None else config[key]
        if value != supported:
            raise ModelError(path, f"{key!r} is {value!r}; only {supported!r} is supported")
    if mapping.check is not None:
        mapping.check(path, config)

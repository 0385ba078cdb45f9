"""Qwen3-MoE's shape, read from a model's metadata, and the check that its tensors have that shape.

Architecture: Qwen3 technical report, https://arxiv.org/abs/2505.09388; metadata keys as llama.cpp has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.models.errors import ModelError
from moeserve.models.gguf import Metadata, TensorInfo
from moeserve.models.gguf import names as n
from moeserve.models.source import ModelSource

ARCHITECTURE = "qwen3moe"
ROPE_SCALING_TYPES = ("none", "linear", "yarn")
MAX_TOP_K = 128  # choosing experts is quadratic in it; Qwen3-MoE has 8


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the training context.

    "yarn" as in https://arxiv.org/abs/2309.00071; the other fields mean nothing for "none", and only
    `factor` does for "linear".
    """

    type: str = "none"  # one of ROPE_SCALING_TYPES
    factor: float = 1.0  # >= 1: context after over context before
    original_context_length: int = 0  # tokens
    attn_factor: float = 1.0  # multiplies yarn's own attention scale, 0.1 ln(factor) + 1
    beta_fast: float = 32.0  # rotations within the original context above which a frequency is left alone
    beta_slow: float = 1.0  # and below which it is interpolated fully


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    num_experts: int
    top_k: int  # experts a token
    expert_ff: int  # width of one expert
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    context_length: int  # tokens
    vocab_size: int
    tied_embeddings: bool  # the embedding is the output matrix too

    @classmethod
    def from_gguf(cls, gguf: ModelSource) -> Qwen3MoeConfig:
        """Reads and range-checks the metadata. Raises ModelError, also for another architecture."""
        if gguf.architecture != ARCHITECTURE:
            raise ModelError(
                gguf.path,
                f"architecture {gguf.architecture!r} is not supported; supported is {ARCHITECTURE!r}",
            )
        metadata = gguf.metadata
        hidden_size = _int(metadata, "embedding_length", 1, 1 << 16)
        num_heads = _int(metadata, "attention.head_count", 1, 1024)
        context_length = _int(metadata, "context_length", 1, 1 << 24)
        num_experts = _int(metadata, "expert_count", 1, 4096)
        config = cls(
            hidden_size=hidden_size,
            num_layers=_int(metadata, "block_count", 1, 1024),
            num_heads=num_heads,
            num_kv_heads=_int(metadata, "attention.head_count_kv", 1, num_heads, default=num_heads),
            head_dim=_int(metadata, "attention.key_length", 2, 1024, default=hidden_size // num_heads),
            num_experts=num_experts,
            top_k=_int(metadata, "expert_used_count", 1, min(num_experts, MAX_TOP_K)),
            expert_ff=_int(metadata, "expert_feed_forward_length", 1, 1 << 16),
            rms_eps=metadata.require_float(_key("attention.layer_norm_rms_epsilon"), 1e-12, 1e-2),
            rope_theta=metadata.require_float(_key("rope.freq_base"), 2.0, 1e12),
            rope_scaling=_rope_scaling(metadata, context_length),
            context_length=context_length,
            vocab_size=len(metadata.require_strings("tokenizer.ggml.tokens")),
            tied_embeddings=n.OUTPUT not in gguf.tensors,
        )
        _check_consistency(metadata, config)
        return config

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model with its row-major shape: matrices [out, in], experts [E, out, in]."""
        hidden, ff, experts = self.hidden_size, self.expert_ff, self.num_experts
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            n.ATTN_NORM: (hidden,),
            n.ATTN_Q: (q_width, hidden),
            n.ATTN_K: (kv_width, hidden),
            n.ATTN_V: (kv_width, hidden),
            n.ATTN_OUTPUT: (hidden, q_width),
            n.ATTN_Q_NORM: (self.head_dim,),
            n.ATTN_K_NORM: (self.head_dim,),
            n.FFN_NORM: (hidden,),
            n.FFN_GATE_INP: (experts, hidden),
            n.FFN_GATE_EXPS: (experts, ff, hidden),
            n.FFN_UP_EXPS: (experts, ff, hidden),
            n.FFN_DOWN_EXPS: (experts, hidden, ff),
        }
        shapes: dict[str, tuple[int, ...]] = {
            n.TOKEN_EMBD: (self.vocab_size, hidden),
            n.OUTPUT_NORM: (hidden,),
        }
        if not self.tied_embeddings:
            shapes[n.OUTPUT] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            shapes |= {n.of_layer(index, part): shape for part, shape in layer.items()}
        return shapes

    def check_tensors(self, gguf: ModelSource) -> None:
        """Every tensor is there with exactly the expected shape, and no other. Raises ModelError."""
        expected = self.expected_shapes()
        for name, shape in expected.items():
            tensor = gguf.tensors.get(name)
            if tensor is None:
                raise ModelError(
                    gguf.path,
                    f"tensor {name!r} is missing; the file is incomplete, download or convert it again",
                )
            _check_tensor(gguf, tensor, shape)
        for name in gguf.tensors:
            if name not in expected:  # a bias left out, say, would quietly change every answer
                raise ModelError(gguf.path, f"tensor {name!r} has no place in architecture {ARCHITECTURE!r}")


def _check_tensor(gguf: ModelSource, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(
            gguf.path,
            f"tensor {tensor.name!r} has shape {list(tensor.shape)} (outermost dimension first), "
            f"{list(shape)} is expected from the metadata; convert the model again",
        )
    if len(shape) == 1 and tensor.type.is_quantised:
        raise ModelError(
            gguf.path,
            f"tensor {tensor.name!r} is of type {tensor.type.name}; norms are expected as F32, F16 or BF16",
        )


def _rope_scaling(metadata: Metadata, context_length: int) -> RopeScaling:
    factor = metadata.require_float(_key("rope.scaling.factor"), 0.0, 1024.0, default=1.0) or 1.0
    # A factor without a type is linear scaling: the meaning that files had before the type existed.
    kind = metadata.require_str(_key("rope.scaling.type"), default="none" if factor == 1.0 else "linear")
    if kind not in ROPE_SCALING_TYPES:
        supported = ", ".join(ROPE_SCALING_TYPES)
        raise metadata.error(
            _key("rope.scaling.type"), f"is {kind!r}, which is not supported; supported are {supported}"
        )
    if kind == "none":
        return RopeScaling()
    if factor < 1.0:
        raise metadata.error(_key("rope.scaling.factor"), f"is {factor}; 1.0 or more is supported")
    if kind == "linear":
        return RopeScaling("linear", factor)
    metadata.require_float(_key("rope.scaling.yarn_ext_factor"), 1.0, 1.0, default=1.0)
    beta_slow = metadata.require_float(_key("rope.scaling.yarn_beta_slow"), 1e-3, 1e6, default=1.0)
    return RopeScaling(
        type="yarn",
        factor=factor,
        original_context_length=_int(
            metadata, "rope.scaling.original_context_length", 1, 1 << 24, default=context_length
        ),
        attn_factor=metadata.require_float(
            _key("rope.scaling.yarn_attn_factor"),
            1e-3,
            1e3,
            default=metadata.require_float(_key("rope.scaling.attn_factor"), 1e-3, 1e3, default=1.0),
        ),
        beta_fast=metadata.require_float(_key("rope.scaling.yarn_beta_fast"), beta_slow, 1e6, default=32.0),
        beta_slow=beta_slow,
    )


def _check_consistency(metadata: Metadata, config: Qwen3MoeConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise metadata.error(
            _key("attention.head_count_kv"),
            f"is {config.num_kv_heads}; it must divide the {config.num_heads} heads",
        )
    if config.head_dim % 2:
        raise metadata.error(_key("attention.key_length"), f"is {config.head_dim}; RoPE needs an even number")
    # Each of these may only repeat what is known; anything else is a variant that we would compute wrongly.
    for suffix in ("attention.value_length", "rope.dimension_count"):
        _int(metadata, suffix, config.head_dim, config.head_dim, default=config.head_dim)
    _int(metadata, "vocab_size", config.vocab_size, config.vocab_size, default=config.vocab_size)
    _int(metadata, "expert_shared_count", 0, 0, default=0)
    _int(metadata, "leading_dense_block_count", 0, 0, default=0)


def _key(suffix: str) -> str:
    return f"{ARCHITECTURE}.{suffix}"


def _int(metadata: Metadata, suffix: str, low: int, high: int, default: int | None = None) -> int:
    return metadata.require_int(_key(suffix), low, high, default)

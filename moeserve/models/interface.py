"""What may be known of a model outside this package: its shape. No torch, and no architecture's name.

A `ModelFamily` (`registry.py` lists them) reads a file's metadata into a `ModelShape`, made of the features
that `blocks` has. Both engines build their decoder from the shape, and placement, plan, KV and worker read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.mapping import HuggingFaceMapping
from moeserve.models.sources.source import ModelSource

# Which vectors of q and k are RMS-normalised before they are rotated: none, each head's, or all heads' as one.
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the training context.

    "yarn" as in https://arxiv.org/abs/2309.00071; the other fields mean nothing for "none", and only
    `factor` does for "linear".
    """

    type: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0  # >= 1: context after over context before
    original_context_length: int = 0  # tokens
    attn_factor: float = 1.0  # multiplies yarn's own attention scale, 0.1 ln(factor) + 1
    beta_fast: float = 32.0  # rotations within the original context above which a frequency is left alone
    beta_slow: float = 1.0  # and below which it is interpolated fully


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention with rotary positions (https://arxiv.org/abs/2305.13245)."""

    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """Numbers that one token leaves in the KV cache."""
        return 2 * self.kv_width


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token passes, beside those it is routed to."""

    width: int
    is_gated: bool  # its output is multiplied by sigmoid(gate . y)


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture of `num_experts` gated feed-forwards, of which a router chooses `top_k` for each token."""

    num_experts: int
    top_k: int
    width: int  # of one expert
    router: RouterOptions = field(default_factory=RouterOptions)
    shared: SharedExpert | None = None


@dataclass(frozen=True, slots=True)
class LayerShape:
    attention: AttentionShape
    ffn: MoeShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: embedding, layers of attention and experts, each behind an RMSNorm, and a head.

    Layers may differ. The properties that speak of the whole model give the largest of all layers, which is what
    buffers are made for.
    """

    architecture: str
    hidden_size: int
    layers: tuple[LayerShape, ...]
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    context_length: int  # tokens
    vocab_size: int
    tied_embeddings: bool  # the embedding is the output matrix too

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_width(self) -> int:
        return max(layer.attention.q_width for layer in self.layers)

    @property
    def kv_width(self) -> int:
        return max(layer.attention.kv_width for layer in self.layers)

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def num_experts(self) -> int:
        return max(layer.ffn.num_experts for layer in self.layers)

    @property
    def top_k(self) -> int:
        """Routed experts of a token in a layer."""
        return max(layer.ffn.top_k for layer in self.layers)

    @property
    def expert_width(self) -> int:
        return max(layer.ffn.width for layer in self.layers)

    @property
    def shared_width(self) -> int:
        """Of the shared expert; 0 where no layer has one."""
        return max(0 if layer.ffn.shared is None else layer.ffn.shared.width for layer in self.layers)


def expert_tensors(layer: int) -> tuple[str, str, str]:
    """The names of a layer's gate, up and down matrices of all routed experts."""
    gate, up, down = (n.of_layer(layer, part) for part in n.EXPERT_PARTS)
    return gate, up, down


def dense_tensors(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """The layer's tensors outside the routed experts, by name, with their row-major shapes: matrices [out, in]."""
    hidden, attention, ffn = shape.hidden_size, shape.layers[layer].attention, shape.layers[layer].ffn
    q, kv = attention.q_width, attention.kv_width
    parts: dict[str, tuple[int, ...]] = {
        n.ATTN_NORM: (hidden,),
        n.ATTN_Q: (q, hidden),
        n.ATTN_K: (kv, hidden),
        n.ATTN_V: (kv, hidden),
        n.ATTN_OUTPUT: (hidden, q),
        n.FFN_NORM: (hidden,),
        n.FFN_GATE_INP: (ffn.num_experts, hidden),
    }
    if attention.qk_norm == "head":
        parts |= {n.ATTN_Q_NORM: (attention.head_dim,), n.ATTN_K_NORM: (attention.head_dim,)}
    elif attention.qk_norm == "full":
        parts |= {n.ATTN_Q_NORM: (q,), n.ATTN_K_NORM: (kv,)}
    if ffn.shared is not None:
        width = ffn.shared.width
        parts |= {n.FFN_GATE_SHEXP: (width, hidden), n.FFN_UP_SHEXP: (width, hidden)}
        parts |= {n.FFN_DOWN_SHEXP: (hidden, width)}
        if ffn.shared.is_gated:
            parts |= {n.FFN_GATE_INP_SHEXP: (hidden,)}
    tensors = {n.of_layer(layer, part): dimensions for part, dimensions in parts.items()}
    if attention.qkv_bias:
        biases = {n.ATTN_Q: q, n.ATTN_K: kv, n.ATTN_V: kv}
        tensors |= {n.bias_of_layer(layer, part): (width,) for part, width in biases.items()}
    return tensors


def model_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its row-major shape: matrices [out, in], experts [E, out, in]."""
    hidden = shape.hidden_size
    tensors: dict[str, tuple[int, ...]] = {
        n.TOKEN_EMBD: (shape.vocab_size, hidden),
        n.OUTPUT_NORM: (hidden,),
    }
    if not shape.tied_embeddings:
        tensors[n.OUTPUT] = (shape.vocab_size, hidden)
    for index, layer in enumerate(shape.layers):
        tensors |= dense_tensors(shape, index)
        up, down = (layer.ffn.width, hidden), (hidden, layer.ffn.width)
        of_experts = zip(expert_tensors(index), (up, up, down), strict=True)
        tensors |= {name: (layer.ffn.num_experts, *matrix) for name, matrix in of_experts}
    return tensors


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """An architecture: how its files are read. What it computes is said by the shape."""

    architecture: str  # `general.architecture` of its GGUF files
    # Reads and range-checks the metadata. Raises ModelError.
    read_shape: Callable[[ModelSource], ModelShape]
    hugging_face: HuggingFaceMapping | None = None  # None: only GGUF files are read

"""What may be known of a model outside this package: its shape. No torch, and no architecture's name.

A `ModelFamily` (`registry.py` lists them) reads a file's metadata into a `ModelShape`, made of the features
that `blocks` has. Both engines build their decoder from the shape, and placement, plan, KV and worker read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.kernels.gating import Activation
from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.latent import AttentionForm, LatentAttentionShape
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
    truncate: bool = True  # the ramp between the two begins and ends at whole dimensions


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention with rotary positions (https://arxiv.org/abs/2305.13245)."""

    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    # How many of a head's dimensions rotate, from the first, half against half; None: all.
    rotated: int | None = None
    window: int = 0  # a position sees itself and the window - 1 before it; 0: all before it
    has_sinks: bool = False  # each head's softmax has one more logit, which has no value
    # q's matrix has twice the rows: of each head q, then a gate, whose sigmoid multiplies the head's output.
    is_gated: bool = False
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    has_v_norm: bool = False  # v is RMS-normalised by head, without a weight
    v_from_k: bool = False  # v has no matrix: it is k's product, before k's norm and rotation
    rope_theta: float | None = None  # None: the model's
    has_rope_factors: bool = False  # the file says by what each frequency is divided
    has_positions: bool = (
        True  # q and k are rotated; False: by no angle, so that order is told by the mask alone
    )
    # In the file the dimensions that rotate are pairs of neighbours. The loaders bring q's and k's rows into the order
    # in which halves rotate (loading/head_order.py), so that no kernel knows of pairs.
    in_pairs: bool = False

    @property
    def form(self) -> AttentionForm:
        return AttentionForm(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rotary_dim,
            self.rope_theta,
            self.has_rope_factors,
            self.has_positions,
        )

    @property
    def qkv_parts(self) -> tuple[str, ...]:
        """The matrices over the layer's input, by name."""
        return (n.ATTN_Q, n.ATTN_K) if self.v_from_k else (n.ATTN_Q, n.ATTN_K, n.ATTN_V)

    @property
    def q_width(self) -> int:
        """Without gates."""
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q's matrix."""
        return self.q_width * (2 if self.is_gated else 1)

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Width of what the last product takes."""
        return self.q_width

    @property
    def kv_values(self) -> int:
        """Numbers that one token leaves in the KV cache."""
        return 2 * self.kv_width

    @property
    def attended_values(self) -> int:
        """Numbers that are multiplied and added for each pair of a query's token and a key's."""
        return 2 * self.q_width

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_dim if self.rotated is None else self.rotated


@dataclass(frozen=True, slots=True)
class GatedDeltaNetShape:
    """A recurrent layer in place of attention (https://arxiv.org/abs/2412.06464): a state of its own size for every
    sequence, however long."""

    heads: DeltaHeads
    # One matrix gives b and a: for each key head b, then a, of its value heads. Otherwise each has its own.
    merged_gates: bool

    @property
    def input_parts(self) -> tuple[tuple[str, int], ...]:
        """The matrices over the layer's input, by name and rows: qkv, z, then b and a."""
        h = self.heads
        parts = ((n.ATTN_QKV, h.channels), (n.ATTN_GATE, h.value_width))
        if self.merged_gates:
            return *parts, (n.SSM_BA, 2 * h.value_heads)
        return *parts, (n.SSM_BETA, h.value_heads), (n.SSM_ALPHA, h.value_heads)

    @property
    def input_width(self) -> int:
        """Their rows together."""
        return sum(rows for _, rows in self.input_parts)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token passes, beside those it is routed to."""

    width: int
    is_gated: bool  # its output is multiplied by sigmoid(gate . y)
    parts: tuple[str, str, str] = n.SHARED_PARTS  # what files call its gate, up and down
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture of `num_experts` gated feed-forwards, of which a router chooses `top_k` for each token."""

    num_experts: int
    top_k: int
    width: int  # of one expert
    router: RouterOptions = field(default_factory=RouterOptions)
    shared: SharedExpert | None = None
    router_bias: bool = False  # of the router's product
    choice_bias: bool = False  # added to scores for the choice, not to the weights
    activation: Activation = "silu"  # of the routed experts
    expert_bias: bool = False  # of the routed experts' three products
    expert_scale: bool = False  # a chosen expert's weight is multiplied by the expert's own
    # The router reads the residual stream through a norm of its own, whose weight is divided by sqrt(hidden).
    router_norm: bool = False


@dataclass(frozen=True, slots=True)
class DenseFfnShape:
    """One gated feed-forward, which every token passes: no experts."""

    width: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    mixer: AttentionShape | LatentAttentionShape | GatedDeltaNetShape
    ffn: MoeShape | DenseFfnShape
    ffn_norm: str = n.FFN_NORM  # what files call the norm before the feed-forward
    # Each block's output is normalised before it is added, the shared expert's and the routed ones' each by itself
    # before; the routed ones have a norm of their input, too; and x is multiplied by a number behind the layer.
    is_sandwiched: bool = False

    @property
    def attention(self) -> AttentionShape | LatentAttentionShape | None:
        """None for a recurrent layer."""
        return None if isinstance(self.mixer, GatedDeltaNetShape) else self.mixer

    @property
    def delta_net(self) -> GatedDeltaNetShape | None:
        """None for a layer that attends."""
        return self.mixer if isinstance(self.mixer, GatedDeltaNetShape) else None

    @property
    def moe(self) -> MoeShape | None:
        """None for a layer without experts."""
        return self.ffn if isinstance(self.ffn, MoeShape) else None

    @property
    def num_experts(self) -> int:
        return 0 if self.moe is None else self.moe.num_experts

    @property
    def num_routes(self) -> int:
        """Routed experts of a token."""
        return 0 if self.moe is None else self.moe.top_k

    @property
    def unrouted_width(self) -> int:
        """Width of the feed-forward that every token passes: the shared expert, or the only one. 0 where there is
        none."""
        if isinstance(self.ffn, DenseFfnShape):
            return self.ffn.width
        return 0 if self.ffn.shared is None else self.ffn.shared.width

    @property
    def unrouted_activation(self) -> Activation:
        """The activation of that feed-forward."""
        if isinstance(self.ffn, DenseFfnShape) or self.ffn.shared is None:
            return "silu"
        return self.ffn.shared.activation

    @property
    def num_parts(self) -> int:
        """Feed-forwards whose outputs a token adds up."""
        return self.num_routes + (1 if self.unrouted_width else 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: embedding, layers of a mixer (attention or a recurrence) and a feed-forward, each behind an RMSNorm,
    and a head.

    Layers may differ, but for latent attention and recurrence; at least one attends. The properties that
    speak of the whole model give the largest of all layers, which is what buffers are made for; 0 where no layer has
    such a thing.
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
    # Behind `layers` in the file: layers that predict tokens further ahead (MTP). See `skipped_layers.py`.
    num_skipped_layers: int = 0
    next_token_layer: LayerShape | None = (
        None  # that of the block which drafts (next_token.py); None: none does
    )
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0  # c: logits are c * tanh(logits / c); 0: as they are
    logit_scale: float = 1.0  # multiplies logits: the last norm's weight is loaded times it

    def __post_init__(self) -> None:
        """Raises ValueError where no layer attends, for latent attention beside another form, and for recurrent layers
        of several forms."""
        kinds = {type(layer.attention).__name__ for layer in self.layers if layer.attention is not None}
        if len(kinds) != 1 or (self.latent is not None and len(self.forms) > 1):
            raise ValueError(f"layers with attention of one kind expected, not {sorted(kinds)}")
        if len({layer.delta_net for layer in self.layers} - {None}) > 1:
            raise ValueError("recurrent layers of different forms")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def loaded_layers(self) -> tuple[LayerShape, ...]:
        """`layers`, and behind them, as number `num_layers`, the layer of the block that drafts, if there is one."""
        return self.layers if self.next_token_layer is None else (*self.layers, self.next_token_layer)

    @property
    def forms(self) -> tuple[AttentionForm, ...]:
        """The forms of attention in the layers, each once."""
        attending = (layer.attention for layer in self.layers if layer.attention is not None)
        return tuple(dict.fromkeys(attention.form for attention in attending))

    @property
    def heads(self) -> AttentionShape | LatentAttentionShape:
        """The heads of every layer that attends, as far as buffers, angles and plans ask, where there is one form: not
        its window, say."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def latent(self) -> LatentAttentionShape | None:
        """The latent attention of every layer, None where attention is not latent."""
        return self.heads if isinstance(self.heads, LatentAttentionShape) else None

    @property
    def delta_net(self) -> GatedDeltaNetShape | None:
        """The gated DeltaNet of every recurrent layer; None where all attend."""
        return next((layer.delta_net for layer in self.layers if layer.delta_net is not None), None)

    @property
    def mixed_width(self) -> int:
        """Width of what a layer's mixer gives to its last product."""
        recurrent = 0 if self.delta_net is None else self.delta_net.heads.value_width
        return max(recurrent, *(attention.output_width for attention in self._attending))

    @property
    def q_width(self) -> int:
        return max(attention.q_width for attention in self._attending)

    @property
    def q_rows(self) -> int:
        return max(attention.q_rows for attention in self._attending)

    @property
    def kv_width(self) -> int:
        """Width of k and of v; 0 for latent attention, which has neither."""
        return max(a.kv_width if isinstance(a, AttentionShape) else 0 for a in self._attending)

    @property
    def head_dim(self) -> int:
        return max(form.head_dim for form in self.forms)

    @property
    def is_sandwiched(self) -> bool:
        """Some layer is."""
        return any(layer.is_sandwiched for layer in self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def num_experts(self) -> int:
        """The experts of a layer that has any."""
        return max(layer.num_experts for layer in self.layers)

    @property
    def top_k(self) -> int:
        """Routed experts of a token in a layer."""
        return max(layer.num_routes for layer in self.layers)

    @property
    def expert_width(self) -> int:
        return max((moe.width for moe in self._mixtures), default=0)

    @property
    def shared_width(self) -> int:
        return max((0 if moe.shared is None else moe.shared.width for moe in self._mixtures), default=0)

    @property
    def dense_width(self) -> int:
        """Width of the feed-forward of a layer without experts."""
        return max((0 if layer.moe else layer.unrouted_width for layer in self.layers), default=0)

    @property
    def unrouted_width(self) -> int:
        return max(layer.unrouted_width for layer in self.layers)

    @property
    def num_parts(self) -> int:
        return max(layer.num_parts for layer in self.layers)

    @property
    def _attending(self) -> list[AttentionShape | LatentAttentionShape]:
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def _mixtures(self) -> list[MoeShape]:
        return [layer.moe for layer in self.layers if layer.moe is not None]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """An architecture: how its files are read. What it computes is said by the shape."""

    architecture: str  # `general.architecture` of its GGUF files
    # Reads and range-checks the metadata. Raises ModelError.
    read_shape: Callable[[ModelSource], ModelShape]
    hugging_face: HuggingFaceMapping | None = None  # None: only GGUF files are read
    # A next-token block of its files has a layer as the last one that attends: see next_token.py.
    has_next_token_block: bool = False

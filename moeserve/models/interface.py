"""What may be known of a model outside this package: its shape. No torch, and no architecture's name.

A `ModelFamily` (`registry.py` lists them) reads a file's metadata into a `ModelShape`, made of the features
that `blocks` has. Both engines build their decoder from the shape, and placement, plan, KV and worker read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from moeserve.kernels.gating import OAI_ALPHA, Activation
from moeserve.kernels.routing.options import RouterOptions
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.mapping import HuggingFaceMapping
from moeserve.models.sources.source import ModelSource

# Which vectors of q and k are RMS-normalised before they are rotated: none, each head's, the same without a weight, or
# all heads' as one.
QkNorm = Literal["none", "head", "unweighted", "full"]
# What multiplies attention's output: the sigmoid of gates. in_q: in q's matrix, of each head q, then its gate. element,
# head: of a matrix of their own, for each number of the output, or each head. head_softplus: the softplus instead.
OutputGate = Literal["none", "in_q", "element", "head", "head_softplus"]


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
    gate: OutputGate = "none"
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    has_v_norm: bool = False  # v is RMS-normalised by head, without a weight
    v_from_k: bool = False  # v has no matrix: it is k's product, before k's norm and rotation
    rope_theta: float | None = None  # None: the model's
    has_rope_factors: bool = False  # the file says by what each frequency is divided
    has_positions: bool = True  # q and k are rotated; False: the mask alone tells the order
    value_dim: int | None = None  # of a head's value; None: head_dim
    v_scale: float = 1.0  # multiplies v
    norm_after: bool = False  # the norms of q and k, by head, are behind the rotation
    rope_scaled: bool = True  # positions are stretched as the model's `rope_scaling` says; False: not at all
    # The layer has no k and v of its own, but attends to those of an earlier one, whose number this is.
    kv_from: int | None = None
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
            self.v_dim,
            self.rope_scaled,
        )

    @property
    def qkv_parts(self) -> tuple[str, ...]:
        """The matrices over the layer's input, by name."""
        if self.kv_from is not None:
            return (n.ATTN_Q,)
        return (n.ATTN_Q, n.ATTN_K) if self.v_from_k else (n.ATTN_Q, n.ATTN_K, n.ATTN_V)

    @property
    def is_gated(self) -> bool:
        """q's matrix has gates."""
        return self.gate == "in_q"

    @property
    def has_gate_matrix(self) -> bool:
        return self.gate not in ("none", "in_q")

    @property
    def gate_width(self) -> int:
        """Gates of a token."""
        if self.gate == "none":
            return 0
        return self.output_width if self.gate in ("in_q", "element") else self.num_heads

    @property
    def v_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim

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
        """Width of all heads' keys."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all heads' values."""
        return self.num_kv_heads * self.v_dim

    @property
    def output_width(self) -> int:
        """Width of what the last product takes."""
        return self.num_heads * self.v_dim

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of the vectors that one token leaves in the KV cache for each KV head."""
        return () if self.kv_from is not None else (self.head_dim, self.v_dim)

    @property
    def attended_values(self) -> int:
        """Numbers that are multiplied and added for each pair of a query's token and a key's."""
        return self.q_width + self.output_width

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_dim if self.rotated is None else self.rotated


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token passes, beside those it is routed to."""

    width: int
    is_gated: bool  # its output is multiplied by sigmoid(gate . y)
    parts: tuple[str, str, str] = n.SHARED_PARTS  # what files call its gate, up and down
    activation: Activation = "silu"
    limit: float | None = None  # of the activation: kernels/gating.py


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
    limit: float | None = None  # of that: kernels/gating.py
    alpha: float = OAI_ALPHA  # of "swiglu_oai"
    expert_bias: bool = False  # of the routed experts' three products
    expert_scale: bool = False  # a chosen expert's weight is multiplied by the expert's own
    # A route's weight multiplies what the expert reads, not what it gives.
    weighs_input: bool = False
    # In a sandwiched layer: the shared expert's and the routed ones' outputs are each normalised before they are added,
    # and so is the routed ones' input, and the router's, whose norm's weight is divided by sqrt(hidden).
    parts_normed: bool = False


@dataclass(frozen=True, slots=True)
class DenseFfnShape:
    """One gated feed-forward, which every token passes: no experts."""

    width: int
    activation: Activation = "silu"
    limit: float | None = None  # of that: kernels/gating.py


@dataclass(frozen=True, slots=True)
class LayerShape:
    mixer: AttentionShape | LatentAttentionShape | GatedDeltaNetShape
    ffn: MoeShape | DenseFfnShape
    ffn_norm: str = n.FFN_NORM  # what files call the norm before the feed-forward
    is_sandwiched: bool = False  # each block's output is normalised before it is added
    has_factor: bool = False  # x is multiplied by a number behind the layer
    unread: tuple[str, ...] = ()  # tensors within the layer that its file may have and that change nothing

    @property
    def attention(self) -> AttentionShape | LatentAttentionShape | None:
        """The layer's attention; None for a recurrent layer."""
        return None if isinstance(self.mixer, GatedDeltaNetShape) else self.mixer

    @property
    def delta_net(self) -> GatedDeltaNetShape | None:
        """The layer's gated DeltaNet; None for a layer that attends."""
        return self.mixer if isinstance(self.mixer, GatedDeltaNetShape) else None

    @property
    def moe(self) -> MoeShape | None:
        """The layer's experts; None for a layer without any."""
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
        return 0 if self.unrouted is None else self.unrouted.width

    @property
    def unrouted(self) -> DenseFfnShape | SharedExpert | None:
        """The feed-forward that every token passes; None if there is none."""
        return self.ffn if isinstance(self.ffn, DenseFfnShape) else self.ffn.shared

    @property
    def num_parts(self) -> int:
        """Feed-forwards whose outputs a token adds up."""
        return self.num_routes + (1 if self.unrouted_width else 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: embedding, layers of a mixer (attention or a recurrence) and a feed-forward, each normed, and a head.

    Layers may differ, but for latent attention and recurrence; at least one attends. The properties that speak of the
    whole model give the largest of all layers, for which buffers are made; 0 where no layer has such a thing."""

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
    next_token_layer: LayerShape | None = None  # of the block that drafts (next_token.py); None: none does
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0  # c: logits are c * tanh(logits / c); 0: as they are
    logit_scale: float = 1.0  # multiplies logits: the last norm's weight is loaded times it
    rope_sections: tuple[int, int, int] | None = None  # frequencies by time, height, width (t h w t h w)
    layer_input_width: int = 0  # numbers of each token's own input of each layer; 0: there are none
    spans_see_ahead: bool = False  # in windowed layers, rows of a span of embeddings see all of it
    deep_layers: int = 0  # first layers behind which more is added to the rows of a span (DeepStack)

    def __post_init__(self) -> None:
        """Raises ValueError where no layer attends, or those that do or recur are of kinds that do not go together."""
        kinds = {type(layer.attention).__name__ for layer in self.layers if layer.attention is not None}
        if len(kinds) != 1 or (self.latent is not None and len(self.forms) > 1):
            raise ValueError(f"layers with attention of one kind expected, not {sorted(kinds)}")
        if len({layer.delta_net for layer in self.layers} - {None}) > 1:
            raise ValueError("recurrent layers of different forms")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_size(self) -> int:
        """Numbers of a span's row, with what is added behind `deep_layers`."""
        return self.hidden_size * (1 + self.deep_layers)

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
        """Width of k; 0 for latent attention, which has none."""
        return max(a.kv_width if isinstance(a, AttentionShape) else 0 for a in self._attending)

    @property
    def value_width(self) -> int:
        """The same of v."""
        return max(a.value_width if isinstance(a, AttentionShape) else 0 for a in self._attending)

    @property
    def gate_widths(self) -> set[int]:
        """Numbers of gates that layers' attention has."""
        return {a.gate_width for a in self._attending if isinstance(a, AttentionShape) and a.gate_width}

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

"""The shape of a model: everything that code outside this package knows about it. No torch, no architecture names.

A `ModelFamily` (listed in `registry.py`) reads a file's metadata into a `ModelShape`, which is composed of the
features that `blocks` implements. Both engines build their decoder from it; placement, plan, KV and worker read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.models.attention import Attention, AttentionShape
from moeserve.models.column_orders import ColumnOrders
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.indexer import BlockIndexerShape, ChoosesKeys, IndexerShape
from moeserve.models.latent import AttentionForm, LatentAttentionShape
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import Recurrence
from moeserve.models.residual import NgramShape, ResidualStreams
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.mapping import HuggingFaceMapping
from moeserve.models.sources.source import ModelSource


@dataclass(frozen=True, slots=True)
class LayerShape:
    mixer: Attention | Recurrence | None  # this or the next may be missing
    ffn: MoeShape | DenseFfnShape | None
    ffn_norm: str = n.FFN_NORM  # GGUF name of the norm before the feed-forward
    is_sandwiched: bool = False  # each block's output is normalised before it is added
    # Blocks read a norm of the residual; False: the residual itself (sandwiched only).
    has_input_norms: bool = True
    has_factor: bool = False  # x is multiplied by a number after the layer
    is_parallel: bool = False  # the feed-forward reads the mixer's input, and has no norm of its own
    unused: tuple[str, ...] = ()  # tensors of the layer that a file may contain and that are not used
    # Beside attention: reads the same input, and its output is added, too. Not in sandwiched layers.
    beside: Mamba2Shape | None = None

    @property
    def attention(self) -> Attention | None:
        """The layer's attention; None for a layer that does not attend."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def uses_earlier_choice(self) -> bool:
        """True if the layer uses a choice of keys that is only on the device of the layer before."""
        return isinstance(self.mixer, ChoosesKeys) and self.mixer.uses_earlier_choice

    @property
    def kv_from(self) -> int | None:
        """The earlier layer whose keys this layer attends to; None if it attends to its own keys or does not attend."""
        return self.mixer.kv_from if isinstance(self.mixer, AttentionShape) else None

    @property
    def recurrence(self) -> Recurrence | None:
        """The layer's recurrence, alone or beside attention; None for a layer that is not recurrent."""
        return self.mixer if isinstance(self.mixer, Recurrence) else self.beside

    @property
    def moe(self) -> MoeShape | None:
        """The layer's experts; None without any."""
        return self.ffn if isinstance(self.ffn, MoeShape) else None

    @property
    def num_experts(self) -> int:
        return 0 if self.moe is None else self.moe.num_experts

    @property
    def num_routes(self) -> int:
        """Number of routed experts per token."""
        return 0 if self.moe is None else self.moe.top_k

    @property
    def unrouted_width(self) -> int:
        """Width of the feed-forward that all tokens pass: the shared expert's, or the only one's; 0 without one."""
        return 0 if self.unrouted is None else self.unrouted.width

    @property
    def unrouted(self) -> DenseFfnShape | SharedExpert | None:
        """The feed-forward that all tokens pass; None if there is none."""
        return self.ffn.shared if isinstance(self.ffn, MoeShape) else self.ffn

    @property
    def num_parts(self) -> int:
        """Number of outputs that are summed per token. With latent experts only their outputs count; the shared
        expert's output is added later."""
        is_latent = self.moe is not None and self.moe.latent > 0
        return self.num_routes + (1 if self.unrouted_width and not is_latent else 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder: embedding, layers (a mixer and a feed-forward, each with an RMSNorm before it, after it,
    or both), and a head.

    Latent attention and recurrence each have one form per model, and at least one layer attends. Properties of the
    whole model return the largest value of all layers, for which buffers are allocated; 0 if none has the feature."""

    architecture: str
    hidden_size: int
    layers: tuple[LayerShape, ...]
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    context_length: int  # tokens
    vocab_size: int
    tied_embeddings: bool  # the embedding matrix is also the head
    num_skipped_layers: int = 0  # next-token (MTP) layers after `layers`: skipped_layers.py
    next_token_layer: LayerShape | None = None  # of the next-token block (next_token.py), if any
    next_token_norm: str = n.NEXTN_HEAD_NORM  # name of that block's last norm
    drafts_before_norm: bool = False  # that block reads states before the last norm, its own as well
    embedding_scale: float = 1.0
    norms_embeddings: bool = False  # embeddings are RMS-normalised, without weights
    post_norm_eps: float | None = None  # of post-norms; None: rms_eps
    logit_softcap: float = 0.0  # c: logits become c * tanh(logits / c); 0: unchanged
    logit_scale: float = 1.0  # multiplies logits; merged into the last norm's weight on loading
    rope_sections: tuple[int, int, int] | None = None  # RoPE frequencies: time, height, width
    sections_in_blocks: bool = False  # of `rope_sections`: t t h h w w; else interleaved, t h w t h w
    layer_input_width: int = 0  # width of the per-layer embeddings; 0: none
    spans_see_ahead: bool = False  # in windowed layers, rows of an embedding span see the whole span
    full_layers_see_ahead: bool = False  # with `spans_see_ahead`: in layers without a window, too
    deep_layers: int = 0  # number of first layers whose output DeepStack adds embeddings to
    streams: ResidualStreams | None = None  # of the residual; None: it is one vector
    ngrams: NgramShape | None = None  # n-gram embeddings, which a layer adds to the residual
    centers_norms: bool = False  # norms of the residual subtract its mean first (LayerNorm)
    orders: ColumnOrders | None = None  # of matrices that were quantised in act-order

    def __post_init__(self) -> None:
        """Raises ValueError if no layer attends, if latent attention or recurrent layers have several forms, or if
        mixtures have experts of several input widths."""
        kinds = {type(layer.attention).__name__ for layer in self.layers if layer.attention is not None}
        if len(kinds) != 1 or (self.latent is not None and len(self.forms) > 1):
            raise ValueError(f"layers with attention of one kind expected, not {sorted(kinds)}")
        if len({layer.recurrence for layer in self.layers} - {None}) > 1:
            raise ValueError("recurrent layers of different forms")
        if len({moe.latent for moe in self._mixtures}) > 1:
            raise ValueError("experts of different input widths")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def eps_of_post_norms(self) -> float:
        """The epsilon of post-norms."""
        return self.rms_eps if self.post_norm_eps is None else self.post_norm_eps

    @property
    def num_streams(self) -> int:
        """Number of vectors that form the residual of a token."""
        return 1 if self.streams is None else self.streams.count

    def streams_of(self, layer: int) -> ResidualStreams | None:
        """Returns the residual's streams in this layer of `loaded_layers`; None if the residual is one vector, as in
        the next-token block."""
        return self.streams if layer < self.num_layers else None

    def needs_layer_before(self, index: int) -> bool:
        """Returns whether this layer must be on the same device as the layer before it (layer 0: as the embedding),
        because this layer or a later one uses values that only that device has."""
        later = (self.layers[at].kv_from for at in range(index, self.num_layers))
        shares_keys = any(source is not None and source < index for source in later)
        return self.layers[index].uses_earlier_choice or shares_keys or self.layer_input_width > 0

    @property
    def residual_width(self) -> int:  # of a token
        return self.hidden_size * self.num_streams

    @property
    def embedding_size(self) -> int:
        """Width of a row of a span of embeddings: the embedding itself, plus DeepStack's addition for each of
        the `deep_layers`."""
        return self.hidden_size * (1 + self.deep_layers)

    @property
    def loaded_layers(self) -> tuple[LayerShape, ...]:
        """`layers`, followed by the layer of the next-token block (number `num_layers`), if it is loaded."""
        return self.layers if self.next_token_layer is None else (*self.layers, self.next_token_layer)

    @property
    def cpu_only_block(self) -> str | None:
        """The features of the next-token block that the GPU engine does not support; None if it computes all of it."""
        block = self.next_token_layer
        if block is None:
            return None
        if isinstance(block.mixer, AttentionShape) and block.mixer.window:
            return "windowed attention"
        if block.is_parallel:
            return "attention and feed-forward beside each other"
        return None if self.streams is None else "a model whose residual has several streams"

    @property
    def forms(self) -> tuple[AttentionForm, ...]:
        """The distinct attention forms of the layers."""
        attending = (layer.attention for layer in self.layers if layer.attention is not None)
        return tuple(dict.fromkeys(attention.form for attention in attending))

    @property
    def heads(self) -> Attention:
        """The attention shape of one of the layers, to read sizes that all layers share. Other fields, such as its
        window, may differ between layers."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def latent(self) -> LatentAttentionShape | None:
        """The latent attention of all layers; None if attention is not latent."""
        return self.heads if isinstance(self.heads, LatentAttentionShape) else None

    @property
    def indexer(self) -> IndexerShape | BlockIndexerShape | None:
        """The indexer of the layers that choose keys, which have equal sizes and rules; None if all layers attend to
        all keys."""
        return next((a.indexer for a in self._attending if isinstance(a, ChoosesKeys) and a.indexer), None)

    @property
    def recurrence(self) -> Recurrence | None:
        """The recurrence of all recurrent layers; None if there are none."""
        return next((layer.recurrence for layer in self.layers if layer.recurrence is not None), None)

    @property
    def mixed_width(self) -> int:
        """Input width of the mixers' output product (attention or recurrence)."""
        recurrent = 0 if self.recurrence is None else self.recurrence.heads.value_width
        return max(recurrent, *(attention.output_width for attention in self._attending))

    @property
    def q_width(self) -> int:
        return max(attention.q_width for attention in self._attending)

    @property
    def q_rows(self) -> int:
        return max(attention.q_rows for attention in self._attending)

    @property
    def kv_width(self) -> int:
        """Width of k; 0 for latent attention, which has no k."""
        return max(a.kv_width if isinstance(a, AttentionShape) else 0 for a in self._attending)

    @property
    def value_width(self) -> int:
        """Width of v; 0 for latent attention."""
        return max(a.value_width if isinstance(a, AttentionShape) else 0 for a in self._attending)

    @property
    def gate_widths(self) -> set[int]:
        """The different numbers of attention gates per token that layers have."""
        return {a.gate_width for a in self._attending if isinstance(a, AttentionShape) and a.gate_width}

    @property
    def head_dim(self) -> int:
        return max(form.head_dim for form in self.forms)

    @property
    def is_sandwiched(self) -> bool:
        return any(layer.is_sandwiched for layer in self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def num_experts(self) -> int:
        """Number of experts per layer, in layers with experts."""
        return max(layer.num_experts for layer in self.layers)

    @property
    def top_k(self) -> int:
        """Number of routed experts per token and layer."""
        return max(layer.num_routes for layer in self.layers)

    @property
    def expert_width(self) -> int:
        return max((moe.width for moe in self._mixtures), default=0)

    @property
    def latent_expert_width(self) -> int:
        """Width of latent experts' input and output; 0 if none are latent."""
        return max((moe.latent for moe in self._mixtures), default=0)

    @property
    def experts_input_width(self) -> int:
        """Width of the routed experts' input and output, the same in all layers."""
        return self.latent_expert_width or self.hidden_size

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
    def _attending(self) -> list[Attention]:
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def _mixtures(self) -> list[MoeShape]:
        return [layer.moe for layer in self.layers if layer.moe is not None]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """An architecture: how its files are read. The resulting shape determines the computation."""

    architecture: str  # `general.architecture` in GGUF files
    read_shape: Callable[[ModelSource], ModelShape]  # reads and range-checks the metadata; raises ModelError
    hugging_face: HuggingFaceMapping | None = None  # None: only GGUF files can be read
    has_next_token_block: bool = False  # in some files, its layer like the last that attends: next_token.py
    # Changes that layer to the block's, where the two differ; raises ModelError.
    next_token_layer: Callable[[ModelSource, LayerShape], LayerShape] | None = None

"""Sizes of a token's keys and values and of a sequence's recurrent state. No torch, as placement and plan use it,
too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.attention import AttentionShape
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.interface import ModelShape

KV_BLOCK = 32  # consecutive numbers of a head that share a scale in q8_0


@dataclass(frozen=True, slots=True)
class KvDtype:
    """A data type of the KV cache."""

    name: str  # part of the pages' fingerprint
    number_bytes: int
    # Where the float16 scales apply: per KV_BLOCK numbers, or per token and head.
    scales: Literal["none", "block", "head"] = "none"

    def num_scales(self, head_dim: int) -> int:
        """Scales of one vector of one head."""
        return {"none": 0, "block": head_dim // KV_BLOCK, "head": 1}[self.scales]

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one head's key or value vector of one token, with scales."""
        return head_dim * self.number_bytes + self.num_scales(head_dim) * SCALE_BYTES


SCALE_BYTES = 2
FLOAT16 = KvDtype("float16", 2)
BFLOAT16 = KvDtype("bfloat16", 2)
Q8_0 = KvDtype("q8_0", 1, "block")  # int8
FP8 = KvDtype("fp8", 1, "head")  # e4m3

_BY_FLAG = {"auto": FLOAT16, "f16": FLOAT16, "bf16": BFLOAT16, "q8_0": Q8_0, "fp8": FP8}
# Dtypes that the CPU's attention cannot read, with the dtype to take there.
_GPU_ONLY = {
    BFLOAT16: ("bf16", "f16 (bf16's size, closer to the model)"),
    FP8: ("fp8", "q8_0 (about as small, closer to the model)"),
}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV layout of one model. Per layer: keys and values, [slots, kv_heads, width] each. In latent attention:
    one tensor [slots, 1, rank + rotary_dim]. In compressed attention: one tensor [slots, 1, head_dim] of compressed
    entries, while the keys within the window are in the sequence's state. A layer with an indexer of its own also has a
    tensor of index keys, always float16."""

    shape: ModelShape
    dtype: KvDtype = FLOAT16
    beside_bytes: int = 0  # of a token in the KV cache of a drafting model, which has the same slots

    @property
    def num_layers(self) -> int:
        """Number of layers, including the layer that drafts, if there is one."""
        return len(self.shape.loaded_layers)

    def block(self, layer: int) -> int:
        """Number of tokens that share one slot's KV in `layer`: the tokens of an entry's block; 1 without entries."""
        mixer = self.shape.loaded_layers[layer].mixer
        return max(1, mixer.ratio) if isinstance(mixer, CompressedAttentionShape) else 1

    def layer_bytes(self, layer: int) -> int:
        """Returns the KV bytes of one token in `layer`; if an entry serves a block of tokens, the token's share of
        it."""
        return -(-self.slot_bytes(layer) // self.block(layer))

    def slot_bytes(self, layer: int) -> int:
        """Returns the KV bytes of one slot that has room in `layer`."""
        attention = self.shape.loaded_layers[layer].attention
        if attention is None:
            return 0
        of_head = sum(self.dtype.head_bytes(width) for width in attention.kv_widths)
        return attention.num_kv_heads * of_head + FLOAT16.head_bytes(attention.index_width)

    def state_values(self, layer: int) -> int:
        """Float32 numbers of one sequence's recurrent state in `layer`; 0 for attention without entries in progress."""
        of_layer, ngrams = self.shape.loaded_layers[layer], self.shape.ngrams
        recurrent = 0 if of_layer.recurrence is None else of_layer.recurrence.heads.state_values
        if isinstance(of_layer.mixer, CompressedAttentionShape):
            recurrent = of_layer.mixer.state_values
        if ngrams is None or ngrams.layer != layer:
            return recurrent
        return recurrent + ngrams.state_values(self.shape.residual_width)

    def state_bytes(self, layers: Iterable[int] | None = None) -> int:
        """Bytes of one sequence's recurrent state in `layers`; None: in all layers."""
        indices = range(self.num_layers) if layers is None else layers
        return sum(4 * self.state_values(index) + self.ring_bytes(index) for index in indices)

    def ring_bytes(self, layer: int) -> int:
        """Bytes of the keys of one sequence's last tokens in `layer`, in compressed attention."""
        mixer = self.shape.loaded_layers[layer].mixer
        if not isinstance(mixer, CompressedAttentionShape):
            return 0
        return mixer.ring_rows * FLOAT16.head_bytes(mixer.head_dim)

    def step_key_bytes(self, rows: int) -> int:
        """Returns the bytes of the keys of a step of up to `rows` rows, which are held until they are copied to
        sequences' states."""
        mixers = (layer.mixer for layer in self.shape.loaded_layers)
        dims = (mixer.head_dim for mixer in mixers if isinstance(mixer, CompressedAttentionShape))
        return sum(rows * FLOAT16.head_bytes(dim) for dim in dims)

    def is_windowed(self, layer: int) -> bool:
        """Returns whether the layer attends only to a window of the last tokens. False for the layer that drafts: its
        KV is in the slots of all tokens, and its window is only a mask."""
        if layer >= self.shape.num_layers:
            return False
        attention = self.shape.layers[layer].attention
        return isinstance(attention, AttentionShape) and attention.window > 0

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_windowed(layer))

    @property
    def window(self) -> int:
        """The largest window of all layers, in tokens; 0 if no layer has a window."""
        shapes = (self.shape.loaded_layers[layer].attention for layer in self.windowed_layers)
        return max((shape.window for shape in shapes if isinstance(shape, AttentionShape)), default=0)

    def token_bytes(self, layers: Iterable[int] | None = None) -> int:
        """KV bytes of one token in `layers`; None: in all layers, and in a drafting model."""
        if layers is None:
            return self.token_bytes(range(self.num_layers)) + self.beside_bytes
        return sum(self.layer_bytes(index) for index in layers)


def layout_of(config: ServerConfig, shape: ModelShape, beside: KvLayout | None = None) -> KvLayout:
    """Returns the layout for --kv-cache-dtype. beside: a drafting model's, whose KV has the same slots. Raises
    ConfigError for a dtype that the model does not support."""
    return replace(_layout_of(config, shape), beside_bytes=0 if beside is None else beside.token_bytes())


def _layout_of(config: ServerConfig, shape: ModelShape) -> KvLayout:
    name = config.kv_cache_dtype
    dtype = _BY_FLAG[name]
    if dtype == FLOAT16:
        return KvLayout(shape)
    if shape.latent is not None:
        raise ConfigError(
            f"--kv-cache-dtype {name}: not for {shape.architecture}, whose attention (MLA) keeps one latent vector for "
            "all heads, which is small already; say f16, or leave it out"
        )
    if isinstance(shape.heads, CompressedAttentionShape):
        raise ConfigError(
            f"--kv-cache-dtype {name}: not for {shape.architecture}, whose attention keeps one vector for all heads, "
            "which is small already; say f16, or leave it out"
        )
    if dtype.scales != "none" and any(form.value_dim != form.head_dim for form in shape.forms):
        raise ConfigError(
            f"--kv-cache-dtype {name}: not for {shape.architecture}, whose keys and values are of different widths; "
            "say f16, or leave it out"
        )
    uneven = {form.head_dim for form in shape.forms if form.head_dim % KV_BLOCK}
    if uneven and dtype.scales != "none":
        raise ConfigError(
            f"--kv-cache-dtype {name}: needs heads of a multiple of {KV_BLOCK} numbers, this model's have "
            f"{min(uneven)}; say f16, or leave it out"
        )
    return KvLayout(shape, dtype)


def _caps_scores(shape: ModelShape) -> bool:
    attending = (layer.attention for layer in shape.loaded_layers)
    return any(isinstance(each, AttentionShape) and each.score_cap > 0 for each in attending)


def check_cpu_reads(layout: KvLayout) -> None:
    """Raises ConfigError if only GPU attention can read the layout's dtype."""
    if layout.dtype in _GPU_ONLY:
        name, other = _GPU_ONLY[layout.dtype]
        raise ConfigError(
            f"--kv-cache-dtype {name}: only a GPU's attention reads this type; say {other}, or leave it out"
        )
    if layout.dtype.scales != "none" and _caps_scores(layout.shape):
        raise ConfigError(
            "--kv-cache-dtype q8_0: this model caps its attention scores, and the CPU computes such attention only "
            "over 16-bit keys and values; say f16, or leave it out"
        )

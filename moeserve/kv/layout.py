"""What a token's keys and values take, and a sequence's recurrent state. No torch: placement and plan count by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.interface import AttentionShape, ModelShape

KV_BLOCK = 32  # numbers of a head side by side, which in q8_0 share a scale


@dataclass(frozen=True, slots=True)
class KvDtype:
    """How numbers lie in the cache."""

    name: str  # a page's fingerprint has it
    block_bytes: int  # of KV_BLOCK numbers


FLOAT16 = KvDtype("float16", 2 * KV_BLOCK)
Q8_0 = KvDtype("q8_0", KV_BLOCK + 2)  # int8, and a float16 scale

_REFUSED = {
    "bf16": "f16 is as small, and closer to the model",
    "fp8": "q8_0 is about as small, and closer to the model",
}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Keys and values of one model, token by token: [slots, kv_heads, head_dim] of each layer, twice; of latent
    attention one vector, [slots, 1, rank + rotary_dim]."""

    shape: ModelShape
    dtype: KvDtype = FLOAT16

    def layer_bytes(self, layer: int) -> int:
        """Of one token in one layer."""
        attention = self.shape.layers[layer].attention
        return 0 if attention is None else attention.kv_values * self.dtype.block_bytes // KV_BLOCK

    def state_values(self, layer: int) -> int:
        """Float32 numbers of one sequence's recurrent state in one layer; 0 where it attends instead."""
        delta_net = self.shape.layers[layer].delta_net
        return 0 if delta_net is None else delta_net.heads.state_values

    def state_bytes(self, layers: Iterable[int] | None = None) -> int:
        """Of one sequence's recurrent state in these layers; None: in all."""
        indices = range(self.shape.num_layers) if layers is None else layers
        return 4 * sum(self.state_values(index) for index in indices)

    def is_windowed(self, layer: int) -> bool:
        """It attends to the last tokens alone."""
        attention = self.shape.layers[layer].attention
        return isinstance(attention, AttentionShape) and attention.window > 0

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.shape.num_layers) if self.is_windowed(layer))

    @property
    def window(self) -> int:
        """Tokens that a windowed layer attends to, at most; 0: there is none."""
        shapes = (self.shape.layers[layer].attention for layer in self.windowed_layers)
        return max((shape.window for shape in shapes if isinstance(shape, AttentionShape)), default=0)

    def token_bytes(self, layers: Iterable[int] | None = None) -> int:
        """Of one token in these layers; None: in all."""
        indices = range(self.shape.num_layers) if layers is None else layers
        return sum(self.layer_bytes(index) for index in indices)


def layout_of(config: ServerConfig, shape: ModelShape) -> KvLayout:
    """As --kv-cache-dtype asks. Raises ConfigError for what no engine has, or not for this model."""
    name = config.kv_cache_dtype
    if name in _REFUSED:
        raise ConfigError(f"--kv-cache-dtype {name}: attention does not read it; {_REFUSED[name]}")
    if name != "q8_0":
        return KvLayout(shape)
    if shape.latent is not None:
        raise ConfigError(
            f"--kv-cache-dtype q8_0: not for {shape.architecture}, whose attention (MLA) keeps one latent vector for "
            "all heads, which is small already; say f16, or leave it out"
        )
    uneven = {form.head_dim for form in shape.forms if form.head_dim % KV_BLOCK}
    if uneven:
        raise ConfigError(
            f"--kv-cache-dtype q8_0: needs heads of a multiple of {KV_BLOCK} numbers, this model's have "
            f"{min(uneven)}; say f16, or leave it out"
        )
    return KvLayout(shape, Q8_0)

"""The heads of a gated DeltaNet or of Kimi Delta Attention, and what its state takes.

It does not import torch: model shapes, which every process reads, contain these classes.
"""

from __future__ import annotations

from dataclasses import dataclass

DELTA_CHUNK = 64  # tokens that a GPU takes at a time of a prompt (chunked.py); a power of two


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of q and k, each of which serves value_heads / key_heads heads of v, and the convolution before them.

    A token's channels are all q, all k, all v.
    """

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # a multiple of 32
    value_dim: int  # a multiple of 32
    conv_kernel: int  # tokens that the convolution sees, at least 2
    # Value head h reads key head h % key_heads; otherwise h // (value_heads / key_heads).
    is_tiled: bool = False
    # Kimi Delta Attention (https://arxiv.org/abs/2510.26692): each dimension of a key head decays by itself, and the
    # output's gate is a sigmoid. key_heads is value_heads.
    is_kimi: bool = False

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_width + self.value_width

    @property
    def decays(self) -> int:
        """Decays of a token: one for each head, or for each dimension of all key heads."""
        return self.key_width if self.is_kimi else self.value_heads

    @property
    def delta_values(self) -> int:
        """Numbers of a sequence's delta state: a matrix [key_dim, value_dim] of every value head."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def conv_values(self) -> int:
        """Numbers of a sequence's convolution state [conv_kernel - 1, channels]: its last inputs, the oldest first."""
        return (self.conv_kernel - 1) * self.channels

    @property
    def state_values(self) -> int:
        """Float32 numbers of a sequence's state in one layer: its delta state, then its convolution state."""
        return self.delta_values + self.conv_values

    @property
    def pending_values(self) -> int:
        """Float32 numbers of a draft's record: its channels before and after the convolution, beta and decays."""
        return 2 * self.channels + self.value_heads + self.decays

    def key_head(self, value_head: int) -> int:
        """The key head that a value head reads."""
        if self.is_tiled:
            return value_head % self.key_heads
        return value_head // (self.value_heads // self.key_heads)

"""The head layout of gated DeltaNets and Kimi Delta Attention, and the size of their state.

Imports no torch, because model shapes, which every process reads, contain these classes.
"""

from __future__ import annotations

from dataclasses import dataclass

DELTA_CHUNK = 64  # tokens per chunk of a prompt on a GPU (chunked.py); a power of two


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of q and k, each shared by value_heads / key_heads heads of v, and the convolution before them.

    A token's channels are all of q, then k, then v.
    """

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # a multiple of 32
    value_dim: int  # a multiple of 32
    conv_kernel: int  # tokens in the convolution's window, at least 2
    # True: value head h uses key head h % key_heads; False: h // (value_heads / key_heads).
    is_tiled: bool = False
    # Kimi Delta Attention (https://arxiv.org/abs/2510.26692): each dimension of a key head has its own decay, the
    # output's gate is a sigmoid, and key_heads equals value_heads.
    is_kimi: bool = False
    sigmoid_gate: bool = False  # the output's gate is a sigmoid instead of SiLU; Kimi's always is a sigmoid
    # Kimi: below 0, the logarithm of a decay is this number times a sigmoid (GLM-5.3); 0: minus a softplus.
    decay_bound: float = 0.0

    @property
    def has_sigmoid_gate(self) -> bool:
        return self.is_kimi or self.sigmoid_gate

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
        """Decay factors per token: one per head, or (Kimi) one per dimension of the key heads."""
        return self.key_width if self.is_kimi else self.value_heads

    @property
    def delta_values(self) -> int:
        """Numbers in a sequence's delta state: a matrix [key_dim, value_dim] per value head."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def conv_values(self) -> int:
        """Numbers in a sequence's convolution state [conv_kernel - 1, channels]: the last inputs, oldest first."""
        return (self.conv_kernel - 1) * self.channels

    @property
    def state_values(self) -> int:
        """Float32 numbers in a sequence's state of one layer: delta state, then convolution state."""
        return self.delta_values + self.conv_values

    @property
    def pending_values(self) -> int:
        """Float32 numbers in a draft's record: channels before and after the convolution, beta and decays."""
        return 2 * self.channels + self.value_heads + self.decays

    def key_head(self, value_head: int) -> int:
        """Returns the key head that a value head uses."""
        if self.is_tiled:
            return value_head % self.key_heads
        return value_head // (self.value_heads // self.key_heads)

"""The head layout of Mamba-2 layers, and the size of their state. Imports no torch, like delta_net/heads.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mamba2Heads:
    """The heads of x, the groups of heads that share B and C, and the convolution before them.

    A token's row contains z, then the convolution's channels (all of x, then B, then C), then a dt for each head.
    """

    num_heads: int  # a multiple of num_groups; consecutive heads share a group
    num_groups: int
    head_dim: int  # a multiple of 32
    state_dim: int  # a multiple of 32
    conv_kernel: int  # tokens in the convolution's window, at least 2

    @property
    def value_width(self) -> int:
        """Width of x, of z and of the output, per token."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of B, and of C, per token."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.value_width + 2 * self.key_width

    @property
    def row_width(self) -> int:
        """Width of a token's row: z, x, B, C and dt."""
        return self.value_width + self.channels + self.num_heads

    @property
    def group_width(self) -> int:
        """Number of output values that are normalised together."""
        return self.value_width // self.num_groups

    @property
    def delta_values(self) -> int:
        """Numbers in a sequence's recurrence state: a matrix [state_dim, head_dim] per head."""
        return self.value_width * self.state_dim

    @property
    def state_values(self) -> int:
        """Float32 numbers in a sequence's state of one layer: the recurrence state, then the convolution's last inputs
        [conv_kernel - 1, channels], oldest first, with channels in the order C, B, x."""
        return self.delta_values + (self.conv_kernel - 1) * self.channels

    @property
    def pending_values(self) -> int:
        """Float32 numbers in a draft's record: channels before and after the convolution, dt and decays."""
        return 2 * self.channels + 2 * self.num_heads

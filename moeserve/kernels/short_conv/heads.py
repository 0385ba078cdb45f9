"""The sizes of short convolutions, and of their state. Imports no torch, like delta_net/heads.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShortConvHeads:
    """A gated depthwise convolution. It has no heads; its properties are named as in other recurrences.

    A token's row contains b, c and x, each with all channels.
    """

    channels: int  # a multiple of 32
    conv_kernel: int  # tokens in the convolution's window, at least 2

    @property
    def value_width(self) -> int:
        """Width of the output per token."""
        return self.channels

    @property
    def row_width(self) -> int:
        """Width of a token's row: b, c and x."""
        return 3 * self.channels

    @property
    def delta_values(self) -> int:
        """Size of a sequence's state besides the convolution's window: 0."""
        return 0

    @property
    def state_values(self) -> int:
        """Float32 numbers in a sequence's state of one layer, [conv_kernel - 1, channels]: the last inputs b * x,
        oldest first."""
        return (self.conv_kernel - 1) * self.channels

    @property
    def pending_values(self) -> int:
        """Float32 numbers in a draft's record: its input b * x."""
        return self.channels

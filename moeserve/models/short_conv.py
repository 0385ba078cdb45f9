"""The shape of a short convolution; an alternative to `AttentionShape`."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.kernels.short_conv.heads import ShortConvHeads
from moeserve.models.sources.gguf import names as n


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A gated short convolution (LFM2): each sequence has a state of fixed size, the last inputs."""

    heads: ShortConvHeads

    @property
    def input_width(self) -> int:
        """Rows of the matrix over the layer's input."""
        return self.heads.row_width

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that determine the matrices' dimensions, by metadata name."""
        return {"embedding_length": self.heads.channels}

    @property
    def undivided(self) -> str:
        """The layer kind's name in messages that ranks cannot share it."""
        return "short convolutions"

    @property
    def output_part(self) -> str:
        return n.SHORT_CONV_OUT

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the tensors by name within a layer, with row-major shapes; without the input norm."""
        h = self.heads
        return {
            n.of_part(n.SHORT_CONV_IN): (h.row_width, hidden),
            n.of_part(n.SHORT_CONV): (h.channels, h.conv_kernel),
            n.of_part(n.SHORT_CONV_OUT): (hidden, h.channels),
        }

"""The shape of a recurrent layer. Beside `AttentionShape`, whose place in a layer it takes."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.kernels.delta_net.heads import DeltaHeads
from moeserve.models.sources.gguf import names as n


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

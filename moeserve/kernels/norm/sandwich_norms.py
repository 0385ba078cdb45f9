"""The norms of a layer that has some behind its blocks. No Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PartNorms:
    """The norms of a dense feed-forward and experts side by side."""

    router_input: Tensor
    experts_input: Tensor
    dense_output: Tensor
    experts_output: Tensor


@dataclass(frozen=True, slots=True)
class SandwichNorms:
    """Their weights, float32 [cols] each."""

    attention_output: Tensor
    input: Tensor  # of the feed-forward, or of the dense one beside experts
    output: Tensor  # of what the feed-forward adds, or of the sum of both
    parts: PartNorms | None = None  # None: nothing within the feed-forward is normalised
    factor: Tensor | None = (
        None  # float32 [1]: what the residual stream is multiplied by behind the layer; None: 1
    )

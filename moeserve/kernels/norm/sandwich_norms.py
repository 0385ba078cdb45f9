"""The norms of a layer that has some behind its blocks. No Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SandwichNorms:
    """Their weights, float32 [cols] each."""

    attention_output: Tensor
    dense_input: Tensor
    router_input: Tensor
    experts_input: Tensor
    dense_output: Tensor
    experts_output: Tensor
    output: Tensor  # of the sum of both
    factor: Tensor  # float32 [1]: what the residual stream is multiplied by behind the layer

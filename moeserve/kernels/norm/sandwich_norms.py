"""The norms of a sandwiched layer. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PartNorms:
    """The RMSNorm weights of a layer with a dense feed-forward and experts side by side: of the router's and the
    experts' input, and of both outputs. Each is float32 [hidden]."""

    router_input: Tensor
    experts_input: Tensor
    dense_output: Tensor
    experts_output: Tensor


@dataclass(frozen=True, slots=True)
class SandwichNorms:
    """Weights of the norms, float32 [cols] each."""

    attention_output: Tensor
    # Input norm of the feed-forward, or of the dense one beside experts; None: the feed-forward reads x without a norm.
    input: Tensor | None
    output: Tensor  # norm of the feed-forward's output, or of the sum of both
    parts: PartNorms | None = None  # None: the feed-forward has no inner norms
    factor: Tensor | None = None  # float32 [1]: multiplies the residual stream after the layer; None: 1
    post_norm_eps: float | None = None  # epsilon of both output norms; None: that of the input norms

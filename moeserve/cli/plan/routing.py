"""The probabilities with which tokens are routed to experts: from measured heat, or all equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeserve.models.interface import ModelShape


class RoutingProbabilities:
    """Holds p [layers, experts], the probability that a token is routed to an expert. Each layer's sum is its top_k;
    it is 0 for a layer without experts.

    Tokens count as independent of one another. Tokens of one text really are not, and touch fewer experts."""

    def __init__(self, model: ModelShape, counts: Sequence[Sequence[int]] | None = None) -> None:
        """counts [layers][experts]: tokens routed to each expert. In a layer without counts all experts are equally
        likely."""
        shape = (model.num_layers, model.num_experts)
        weights = np.ones(shape) if counts is None else np.array(counts, np.float64)
        totals = weights.sum(axis=1, keepdims=True)
        weights = np.where(totals > 0, weights, 1.0)
        top_k = np.array([[layer.num_routes] for layer in model.layers])
        p = top_k * weights / np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        self._p: npt.NDArray[np.float64] = np.minimum(p, 1.0)

    def touched(self, layer: int, tokens: int) -> npt.NDArray[np.float64]:
        """Returns [experts]: the probability that at least one of the tokens is routed to the expert."""
        touched: npt.NDArray[np.float64] = 1.0 - (1.0 - self._p[layer]) ** tokens
        return touched

    def share(self, layer: int, experts: Sequence[int]) -> float:
        """Returns the share of a layer's routes that go to these experts; 0 without experts."""
        p = self._p[layer]
        return float(p[list(experts)].sum() / p.sum()) if experts else 0.0

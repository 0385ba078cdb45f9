"""Which experts tokens are routed to, as probabilities: from measured heat, or without preference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeserve.models.interface import ModelShape


class RoutingProbabilities:
    """p [layers, experts]: the probability that a token is routed to an expert; each layer's add up to its top_k, 0 for
    one without experts. Tokens count as independent of one another, though those of one text are less so and touch
    fewer experts."""

    def __init__(self, model: ModelShape, counts: Sequence[Sequence[int]] | None = None) -> None:
        """counts [layers][experts]: tokens routed to each; a layer without any has no preference."""
        shape = (model.num_layers, model.num_experts)
        weights = np.ones(shape) if counts is None else np.array(counts, np.float64)
        totals = weights.sum(axis=1, keepdims=True)
        weights = np.where(totals > 0, weights, 1.0)
        top_k = np.array([[layer.num_routes] for layer in model.layers])
        p = top_k * weights / np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        self._p: npt.NDArray[np.float64] = np.minimum(p, 1.0)

    def touched(self, layer: int, tokens: int) -> npt.NDArray[np.float64]:
        """[experts]: the probability that at least one of the tokens is routed to an expert."""
        touched: npt.NDArray[np.float64] = 1.0 - (1.0 - self._p[layer]) ** tokens
        return touched

    def share(self, layer: int, experts: Sequence[int]) -> float:
        """The share of a layer's routes that go to these experts; 0 without experts."""
        p = self._p[layer]
        return float(p[list(experts)].sum() / p.sum()) if experts else 0.0

"""Generates routing traces with given reuse distances, for models with random weights, whose routing has no
locality.

An expert's depth is the number of other experts of its layer used since its last use. Each choice draws a depth and
takes the expert at that depth. So an LRU cache of any size C hits as often as a depth below C is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moeserve.placement.expert_cache.routing_trace import RoutingTrace

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReuseDistances:
    """The reuse distances of a text, given as hit rates of LRU caches. hits: pairs (cache size as a fraction of the
    layer's experts, hit rate), ascending in both; a cache of all experts always hits. Empty: all experts are equally
    likely."""

    hits: tuple[tuple[Fraction, float], ...]


# Published for Qwen3-30B-A3B with caches of 8, 24, 49 and 81 of 128 experts. In that measurement 45% of a token's
# experts repeat at the next token and 80% within eight tokens.
LOCAL = ReuseDistances(
    ((Fraction(8, 128), 0.366), (Fraction(24, 128), 0.741), (Fraction(49, 128), 0.894), (Fraction(81, 128), 0.962))
)  # fmt: skip
UNIFORM = ReuseDistances(())
PRESETS: Mapping[str, ReuseDistances] = {"local": LOCAL, "uniform": UNIFORM}


def generate(
    distances: ReuseDistances,
    source: str,
    *,
    tokens: int,
    layers: int,
    experts: int,
    top_k: int,
    topic_tokens: int | None = None,
    seed: int = 0,
) -> RoutingTrace:
    """Returns a random trace. topic_tokens: tokens per topic; when the topic changes, all experts are equally
    likely. Raises ValueError if top_k exceeds experts."""
    if not 0 < top_k <= experts:
        raise ValueError(f"{top_k} of {experts} experts")
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(beyond(distances, experts, top_k))
    # The token's earlier choices are on top of the stack: choice j takes one of the `experts - j` below them.
    room = cumulative[experts - np.arange(top_k) - 1]
    ids = np.empty((tokens, layers, top_k), np.uint16)
    for layer in range(layers):
        depths = np.searchsorted(cumulative, rng.random((tokens, top_k)) * room, side="right").tolist()
        stack: list[int] = rng.permutation(experts).tolist()  # most recently used first
        chosen: list[list[int]] = []
        for token, of_token in enumerate(depths):
            if topic_tokens is not None and token and token % topic_tokens == 0:
                stack = rng.permutation(experts).tolist()
            chosen.append([stack.pop(depth) for depth in of_token][::-1])
            stack[:0] = chosen[-1]
        ids[:, layer] = chosen
    return RoutingTrace(source, experts, ids)


def beyond(distances: ReuseDistances, experts: int, top_k: int) -> Floats:
    """Returns the probability [experts] of each depth, counted below the token's own earlier choices. The j-th choice
    of a token cannot have a depth below j; the result corrects for that, so that all depths together follow
    `distances`."""
    if not distances.hits:
        return np.full(experts, 1.0 / experts)
    # With few experts, several fractions round to the same number of experts: the last one counts.
    known = {
        round(part * experts): hits for part, hits in distances.hits if 0 < round(part * experts) < experts
    }
    bands = [np.arange(low, high) for low, high in pairwise([0, *known, experts])]
    # P(depth < C) is the mean over choices j of P(x < C - j): linear in the bands' weights.
    rows, wanted = [], []
    for border, hits in known.items():
        parts = [np.mean([(band < border - j).mean() for j in range(top_k)]) for band in bands]
        rows.append(parts)
        wanted.append(hits)
    rows.append([1.0] * len(bands))
    wanted.append(1.0)
    weights = np.clip(np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0], 0.0, None)
    out: Floats = np.concatenate(
        [np.full(len(band), w / len(band)) for w, band in zip(weights, bands, strict=True)]
    )
    out /= out.sum()
    return out

"""Replays a routing trace through a cache policy, without weights: hit rates and promotions.

A hit is an expert that a step uses and finds in GPU memory. A step counts each expert once, because it reads its
weights once. A promoted expert is available to the next step; in a server, too, most arrive by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.placement.expert_cache.policy import DECAY, CachePolicy, Mask
from moeserve.placement.expert_cache.routing_trace import RoutingTrace

# Steps at the start of a text after which the cache no longer depends on its earlier contents (docs/results/planner.md,
# "A cold beginning").
SETTLING_STEPS = 64


class StepUse(NamedTuple):
    """Numbers of experts used in one step; each field is int64 [layers]."""

    used: npt.NDArray[np.int64]
    missed: npt.NDArray[np.int64]
    promoted: npt.NDArray[np.int64]  # because of this step, copied beside the next one


@dataclass(frozen=True, slots=True)
class Replayed:
    hits: int
    misses: int
    promotions: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class Steps:
    """A trace, read as the steps of several concurrent streams that start at different positions."""

    def __init__(self, trace: RoutingTrace, streams: int) -> None:
        self._trace = trace
        self.streams = streams
        tokens = len(trace.ids)
        self._starts = [stream * tokens // streams for stream in range(streams)]
        self.count = tokens // streams

    def used(self, step: int) -> Mask:
        """Returns bool [layers, experts]: the experts that any stream uses in this step."""
        return self._trace.used(*(start + step for start in self._starts))


def replay_cache(
    steps: Steps,
    cached: Mask,
    *,
    movable: Mask | None = None,
    decay: float = DECAY,
    most: int,
    adapts: bool = True,
    per_step: list[float] | None = None,
    uses: list[StepUse] | None = None,
    missed: list[Mask] | None = None,
) -> Replayed:
    """Replays the steps of a trace with an expert cache, and returns the numbers of hits, misses and promotions.
    cached: bool [layers, experts], the initial contents. movable: the experts that may be promoted or replaced; None:
    all.

    most: maximum number of promotions per step. adapts: whether to promote only if `PAYS` reads are expected to be
    saved. per_step, uses, missed: lists to which each step's hit rate, its use per layer and the experts that it misses
    are appended.
    """
    policy = CachePolicy(cached, np.ones(cached.shape, np.bool_) if movable is None else movable, decay)
    here = cached  # experts that the step can use
    hits = used_in_all = promotions = 0
    for step in range(steps.count):
        used = steps.used(step)
        found, wanted = int((used & here).sum()), int(used.sum())
        hits, used_in_all = hits + found, used_in_all + wanted
        if per_step is not None:
            per_step.append(found / max(1, wanted))
        misses = used & ~here
        if missed is not None:
            missed.append(misses)
        policy.observe(used)
        moves = policy.choose(used, most, pays=adapts)
        policy.learn(used)
        here = policy.cached.copy()
        promotions += len(moves)
        if uses is not None:
            promoted = np.bincount([move.layer for move in moves], minlength=len(cached))
            uses.append(StepUse(used.sum(axis=1), misses.sum(axis=1), promoted))
    return Replayed(hits, used_in_all - hits, promotions)


def first(trace: RoutingTrace, slots: int) -> Mask:
    """Returns bool [layers, experts]: the first `slots` experts of each layer, as a static placement without heat
    chooses them."""
    chosen = np.zeros((trace.ids.shape[1], trace.experts), np.bool_)
    chosen[:, :slots] = True
    return chosen

"""A trace through a cache policy, without weights: hit rates and how much would be promoted.

A hit is an expert that a step uses and has in GPU memory; a step counts each expert once, as it reads its weights once.
What a step has missed is there for the next step, or for the one after that: in the server most of it comes in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moeserve.placement.expert_cache.policy import DECAY, PAYS, CachePolicy, Mask
from moeserve.placement.expert_cache.routing_trace import RoutingTrace

# Of a text, after which a cache has its experts, whatever it had before
# (docs/results/planner.md, "A cold beginning").
SETTLING_STEPS = 64


class StepUse(NamedTuple):
    """The use of experts in one step: int [layers] each."""

    used: npt.NDArray[np.int64]
    missed: npt.NDArray[np.int64]
    promoted: npt.NDArray[np.int64]  # because of it, beside the next step


@dataclass(frozen=True, slots=True)
class Replayed:
    steps: int
    hits: int
    misses: int
    promotions: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    @property
    def promotions_per_step(self) -> float:
        return self.promotions / self.steps


class Steps:
    """A trace as the steps of several streams, each from another place of it on."""

    def __init__(self, trace: RoutingTrace, streams: int) -> None:
        self._trace = trace
        tokens = len(trace.ids)
        self._starts = [stream * tokens // streams for stream in range(streams)]
        self.count = tokens // streams

    def used(self, step: int) -> Mask:
        """[layers, experts]: of any stream."""
        return self._trace.used(*(start + step for start in self._starts))


def replay_static(steps: Steps, cached: Mask) -> Replayed:
    hits = used_in_all = 0
    for step in range(steps.count):
        used = steps.used(step)
        hits += int((used & cached).sum())
        used_in_all += int(used.sum())
    return Replayed(steps.count, hits, used_in_all - hits, 0)


def replay_cache(
    steps: Steps,
    cached: Mask,
    *,
    movable: Mask | None = None,
    decay: float = DECAY,
    most: int,
    pays: float = PAYS,
    adapts: bool = True,
    late: bool = False,
    shared: bool = False,
    per_step: list[float] | None = None,
    uses: list[StepUse] | None = None,
) -> Replayed:
    """cached: [layers, experts], what the cache begins with. movable: the experts that may come and go; None: all.

    most: promotions a step; adapts: only promotions that are expected to spare `pays` reads. late: what a step has
    missed is there for the step after the next. shared: a slot may go to an expert of any layer. per_step: gets each
    step's hit rate; uses: what it used of each layer.
    """
    layers, experts = cached.shape
    rows = (1, layers * experts) if shared else (layers, experts)
    start = cached.reshape(rows)
    policy = CachePolicy(start, np.ones(rows, np.bool_) if movable is None else movable, decay, pays)
    here = start.copy()  # what the step can use: a slot that is being written is of no use
    hits = used_in_all = promotions = 0
    for step in range(steps.count):
        used = steps.used(step).reshape(rows)
        found, wanted = int((used & here).sum()), int(used.sum())
        hits, used_in_all = hits + found, used_in_all + wanted
        if per_step is not None:
            per_step.append(found / max(1, wanted))
        missed = (used & ~here).sum(axis=1)
        here = policy.cached.copy()
        policy.observe(used)
        moves = policy.choose(used, most, pays=adapts)
        policy.learn(used)
        here = here & policy.cached if late else policy.cached.copy()
        promotions += len(moves)
        if uses is not None:
            promoted = np.bincount([move.layer for move in moves], minlength=rows[0])
            uses.append(StepUse(used.sum(axis=1), missed, promoted))
    return Replayed(steps.count, hits, used_in_all - hits, promotions)


def hottest(trace: RoutingTrace, slots: int) -> Mask:
    """[layers, experts]: each layer's experts that the whole trace uses most, as in a static placement by heat."""
    _, layers, _ = trace.ids.shape
    chosen = np.zeros((layers, trace.experts), np.bool_)
    for layer in range(layers):
        counts = np.bincount(trace.ids[:, layer].ravel(), minlength=trace.experts)
        chosen[layer, np.argsort(-counts, kind="stable")[:slots]] = True
    return chosen


def first(trace: RoutingTrace, slots: int) -> Mask:
    """[layers, experts]: of each layer the first by id, which a static placement without heat has."""
    chosen = np.zeros((trace.ids.shape[1], trace.experts), np.bool_)
    chosen[:, :slots] = True
    return chosen

"""Chooses the steps that fetch some of their missed experts within the step, and replays such steps.

A fetch reads an expert's weights once, into the slot where it stays, where a promotion reads them a second time. But
choice and copies take time in each layer, and only experts that layers miss in twos or more are fetched. So steps
fetch where many experts are missed: with many rows, or few slots. Rows that are drafts of one text use much the same
experts.
"""

from __future__ import annotations

import math

import numpy as np

from moeserve.placement.expert_cache.policy import DECAY, Mask
from moeserve.placement.expert_cache.replay import Steps, StepUse

MOST_ROWS = 16  # with more rows a cache gains little
# A layer's routes to experts without a slot, if all experts were equally likely, from which on fetches pay: by replays
# of the preset `local` and by measurement (docs/results/experts-in-ram.md). Those of one text have experts in common.
LEAST_ROUTES, LEAST_OF_ONE_TEXT = 6.0, 8.0
AT_ONCE = 16  # experts of a layer, at most
REPLAYED_SHARE = 0.27  # of a layer's missed experts; measured with 98 GB/s of RAM and 50 GB/s of PCIe


def share_without_slot(movable: Mask, in_slots: Mask) -> float:
    """Returns the share of a layer's experts that may move and have no slot: the mean over the layers with such
    experts, of which there must be one. movable, in_slots: bool [layers, experts]."""
    return float(np.mean((movable & ~in_slots)[np.any(movable, axis=1)]))


def rows_that_fetch(top_k: int, in_ram: float, *, has_drafts: bool) -> range:
    """Returns the rows of steps that fetch, padded to a power of two as a GPU's steps are: three rows fetch where four
    do. in_ram: see `share_without_slot`. has_drafts: whether several rows may be of
    one text."""
    if not in_ram:
        return range(0)
    # Of a text's next token, the share of experts that are new falls with the slots, too.
    rows = LEAST_OF_ONE_TEXT / (top_k * in_ram**2) if has_drafts else LEAST_ROUTES / (top_k * in_ram)
    return range(math.ceil(rows), MOST_ROWS + 1)


def replay_fetches(steps: Steps, cached: Mask, movable: Mask) -> list[StepUse]:
    """Replays steps that all fetch. cached, movable: bool [layers, experts]: the experts in slots at first, and those
    that may be fetched or replaced. An expert fetched by a step counts as missed, and as promoted."""
    here, uses = cached.copy(), []
    scores = np.zeros(cached.shape, np.float32)
    for step in range(steps.count):
        used = steps.used(step)
        scores = scores * np.float32(DECAY) + used
        missed = used & ~here
        fetched = np.zeros(len(here), np.int64)
        for layer in np.flatnonzero((missed & movable).sum(axis=1) > 1):
            (wanted,) = np.nonzero(missed[layer] & movable[layer])
            (may_go,) = np.nonzero(here[layer] & ~used[layer] & movable[layer])
            count = min(int(len(wanted) * REPLAYED_SHARE + 0.5), len(may_go), AT_ONCE)
            coming = wanted[np.argsort(-scores[layer, wanted], kind="stable")[:count]]
            here[layer, may_go[np.argsort(scores[layer, may_go], kind="stable")[:count]]] = False
            here[layer, coming] = True
            fetched[layer] = count
        uses.append(StepUse(used.sum(axis=1), missed.sum(axis=1), fetched))
    return uses

"""Replays a routing trace through the RAM slots of experts on disk, without weights, to count hits and reads.

The slots work as in `kernels/csrc/expert_disk`: a step's missing experts are read before it computes them, each into a
free slot or into the slot of the layer's expert with the lowest score that the step does not need. Guesses of the next
layer's experts are left out: they shorten the wait for some misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve.placement.expert_cache.policy import DECAY, Mask
from moeserve.placement.expert_cache.replay import Steps, StepUse


@dataclass(frozen=True, slots=True)
class Masks:
    """The steps of a trace, given by the experts that each step uses and the GPU does not have."""

    masks: Sequence[Mask]

    @property
    def count(self) -> int:
        return len(self.masks)

    def used(self, step: int) -> Mask:
        """Returns which experts the step used: bool [layers, experts]."""
        return self.masks[step]


def replay_disk(
    steps: Steps | Masks,
    slots: Sequence[int],
    num_experts: int,
    *,
    pinned: Mask | None = None,
    decay: float = DECAY,
) -> list[StepUse]:
    """Returns the use of each step: per layer, the experts that it used and those that it had to read from disk (the
    number of promotions is 0). Before the first step only pinned experts are in slots.

    slots: number of slots of each layer; 0: the layer has no experts on disk and counts nothing. num_experts: of a
    layer. pinned: bool [layers, experts], the experts that stay in their slots.
    """
    capacity = np.array(slots, np.int64)
    here = np.zeros((len(slots), num_experts), np.bool_) if pinned is None else pinned.copy()
    stays = here.copy()
    scores = np.zeros(here.shape, np.float32)
    on_disk = (capacity > 0)[:, None]
    none = np.zeros(len(slots), np.int64)
    uses: list[StepUse] = []
    for step in range(steps.count):
        used = steps.used(step) & on_disk
        missing = used & ~here
        scores = scores * np.float32(decay) + used
        for layer in np.flatnonzero(missing.any(axis=1)):
            coming = np.flatnonzero(missing[layer])
            surplus = int(here[layer].sum()) + len(coming) - int(capacity[layer])
            if surplus > 0:
                may_go = np.flatnonzero(here[layer] & ~used[layer] & ~stays[layer])
                going = may_go[np.argsort(scores[layer, may_go], kind="stable")[:surplus]]
                here[layer, going] = False
            # More experts than slots are computed in waves, in the order of their ids: the last ones stay.
            room = int(capacity[layer]) - int((here[layer] & stays[layer]).sum())
            both = np.union1d(np.flatnonzero(here[layer] & ~stays[layer]), coming)
            here[layer] &= stays[layer]
            here[layer, both[max(0, len(both) - room) :]] = True
        uses.append(StepUse(used.sum(axis=1), missing.sum(axis=1), none))
    return uses

"""The recurrent states' memory, on one device: whole slots, so that a snapshot is one copy."""

from __future__ import annotations

import torch

from moeserve.kernels.stream_operands import StateLayer
from moeserve.kv.layout import KvLayout


class StateCache:
    """The states of some consecutive layers in `num_slots` slots. One writer: the recurrent blocks of those layers, but
    for copies between slots.

    states: float32 [slots, values], a slot's layers one after another. No kernel reads a slot that was not written or
    zeroed before, and pages of RAM come with their first use.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_slots: int,
        layers: range,
        device: torch.device | str = "cpu",
        *,
        zeroed: bool = False,
    ) -> None:
        """zeroed: for dummy steps that are timed, whose KV must be finite."""
        sizes = [layout.state_values(layer) for layer in layers]
        allocate = torch.zeros if zeroed else torch.empty
        self.states = allocate(num_slots, sum(sizes), device=device)
        # Of each layer, where its values begin, with none for one that attends; empty if all of them attend.
        self.layers = [
            StateLayer(self.states, sum(sizes[:index])) for index in range(len(sizes)) if any(sizes)
        ]

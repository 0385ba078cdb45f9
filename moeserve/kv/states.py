"""The tensor of recurrent states on one device. A slot is contiguous, so that one copy makes a snapshot."""

from __future__ import annotations

import torch

from moeserve.kernels.stream_operands import StateLayer
from moeserve.kv.layout import KvLayout


class StateCache:
    """Recurrent states of consecutive layers in `num_slots` slots. Only those layers' recurrent blocks write to
    them, apart from copies between slots.

    states: float32 [slots, values]; a slot holds its layers one after another. Kernels read only slots that were
    written or zeroed before; the operating system allocates RAM pages at first use.
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
        """zeroed: fill with zeros, for timed dummy steps, which must read finite numbers."""
        sizes = [layout.state_values(layer) for layer in layers]
        allocate = torch.zeros if zeroed else torch.empty
        self.states = allocate(num_slots, sum(sizes), device=device)
        # Per layer, the offset of its values in a slot; an attention layer has none. Empty if these layers keep neither
        # a state of a sequence, nor keys that are part of it.
        has_states = any(sizes) or any(layout.ring_bytes(layer) for layer in layers)
        self.layers = [
            StateLayer(self.states, sum(sizes[:index])) for index in range(len(sizes)) if has_states
        ]

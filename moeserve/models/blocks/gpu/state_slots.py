"""Copies between the slots of sequences' states on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moeserve.kernels.stream_operands import KvLayer, StateLayer


class StateSlots:
    """The recurrent states of all layers on this GPU, and the window keys of compressed attention, which are part of a
    state."""

    def __init__(self, states: Sequence[StateLayer], kv: Sequence[KvLayer]) -> None:
        rings = (layer.of_states for layer in kv)
        self._memory: list[Tensor] = [states[0].states] if states else []
        self._rings = [ring for ring in rings if ring is not None]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Launches copies for each (source, target) pair in order, before a step; source -1 zeroes the target.
        Window keys are not zeroed, because rows with an empty state read none."""
        for source, target in pairs:
            if source < 0:
                for states in self._memory:
                    states[target].zero_()
            else:
                for states in (*self._memory, *self._rings):
                    states[target].copy_(states[source])

"""RAM experts in a step: which of them the CPU pool computes, and which are streamed to the GPU or fetched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.launch import is_compiling_ahead
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.models.loading.expert_fetch import ExpertFetch
from moeserve.models.loading.expert_stream import ExpertStream


class RamShare:
    """Divides the current step's RAM experts between the pool and the GPU."""

    def __init__(
        self,
        expert_maps: Sequence[Tensor | None],
        handoff: ExpertHandoff | None,
        expert_stream: ExpertStream | None,
        prefill: Sequence[str] | None,
        num_in_ram: Sequence[int] | None,
    ) -> None:
        """expert_maps: `GpuLayer.expert_map` of each layer. The other arguments are those of `GpuFfnBlock`."""
        self.handoff = handoff
        self.expert_stream = expert_stream
        self.fetch: ExpertFetch | None = (
            None  # set before steps are captured; None: no step fetches missed experts
        )
        num_layers = len(expert_maps)
        # Per layer, placement.Prefill: "cpu" never streams, "cuda" streams whenever there is a prompt.
        self._prefill = ["cpu"] * num_layers if expert_stream is None or prefill is None else list(prefill)
        elsewhere = [0 if m is None or handoff is None else int((m < 0).sum()) for m in expert_maps]
        self._num_in_ram = elsewhere if num_in_ram is None else list(num_in_ram)
        # For the last step: number of streamed experts per layer, and whether the pool had any to compute.
        self.streamed = [0] * num_layers
        self.pool_works = False

    def is_shared(self, index: int) -> bool:
        """Returns whether some experts of the layer are in RAM. index: of the layer, from 0."""
        return self._num_in_ram[index] > 0

    def computes(self, index: int) -> bool:
        """Returns whether the pool takes part in the layer of the current step. index: of the layer, from 0."""
        return self.pool_works and self.is_shared(index)

    def fetch_of(self, index: int, rows: int) -> ExpertFetch | None:
        """Returns what fetches a part of the layer's missed experts in the current step, of this number of rows; None
        if nothing does."""
        fetch = self.fetch
        if fetch is None or any(self.streamed) or not fetch.takes(rows) or not fetch.has(index):
            return None
        return fetch

    def streams(self, batch: GpuBatch) -> bool:
        """Returns whether the step streams experts from RAM to the GPU."""
        return any(self._to_stream(layer, batch) for layer in range(len(self._prefill)))

    def begin(self, batch: GpuBatch | None) -> None:
        """Starts the host's work for experts in RAM before a step or its replay (None); not part of a graph."""
        num_layers = len(self._prefill)
        self.streamed = [0 if batch is None else self._to_stream(i, batch) for i in range(num_layers)]
        if any(self.streamed):
            assert self.expert_stream is not None
            self.expert_stream.begin(self.streamed)
        self.pool_works = self.handoff is not None and self.streamed != self._num_in_ram
        if self.pool_works and not is_compiling_ahead():
            assert self.handoff is not None
            self.handoff.begin()

    def assume_graph(self) -> None:
        """Sets `pool_works` as it is in a replay, and starts nothing: for a graph of what follows a step."""
        self.streamed = [0] * len(self._prefill)
        self.pool_works = self.handoff is not None and self.streamed != self._num_in_ram

    def check(self) -> None:
        """Checks whether the CPU has computed its part of the step; to be called after each step. Raises HandoffError
        if the CPU failed; the step's results are then invalid."""
        if self.handoff is not None:
            self.handoff.check()

    def pool_reads(self, layers: npt.NDArray[np.bool_]) -> int:
        """Returns how many experts of these layers (bool [layers]) the CPU pool has read since start-up; 0 without a
        pool."""
        return 0 if self.handoff is None else self.handoff.expert_reads(layers)

    def forget_counts(self) -> None:
        """Zeroes the pool's expert counts."""
        if self.handoff is not None:
            for layer in range(len(self._prefill)):
                self.handoff.expert_token_counts(layer).zero_()

    def _to_stream(self, layer: int, batch: GpuBatch) -> int:
        way, count = self._prefill[layer], self._num_in_ram[layer]
        if way == "cuda":
            return count if batch.tiles is not None else 0
        return round(count * batch.streamed) if way == "auto" else 0

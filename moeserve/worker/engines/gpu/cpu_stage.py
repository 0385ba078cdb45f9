"""A pipeline stage: the first layers of a model on the CPU, where the GPU has no room for their dense parts.

    CPU pool   embedding · layer 0 · … · layer k-1 │            (the RAM experts of the GPU's layers)
    PCIe                                            │ x │
    GPU                                                 │ layer k · … · head

k may be 0: then the embedding alone is in RAM. A step's rows cross once, as the residual stream x [rows, hidden]. The
pool is the hand-off's too, and takes its work in order: `compute` comes before `GpuDecoder.begin`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.observer import LayerObserver
from moeserve.worker.engines.cpu.engine import launch
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class CpuStage:
    """Owns the CPU's part of the model, with its KV and x."""

    def __init__(self, stream: CpuStream, model: CpuDecoder) -> None:
        self._stream = stream
        self._model = model

    @property
    def num_layers(self) -> int:
        return len(self._model.expert_token_counts)

    @property
    def x(self) -> Tensor:
        """float32 [max_tokens, hidden], pinned: the GPU reads a step's rows from there."""
        return self._model.x

    def copy_states(self, pairs: Int32s) -> None:
        """As `CpuDecoder.copy_states`, before `compute`."""
        self._model.copy_states(torch.from_numpy(pairs.copy()))

    def compute(
        self, layout: StepLayout, sequences: Sequences, observer: LayerObserver | None = None
    ) -> None:
        """Returns when x is there. The GPU must be done with the step before."""
        launch(layout, sequences, self._model, observer)
        self._stream.wait()

    def fill_dummy(self, n: int) -> None:
        """Random rows instead, for timing the GPU's part: what is routed as nothing is would be timed wrongly."""
        x = self._model.x[:n].numpy()
        np.random.default_rng(0).standard_normal(dtype=np.float32, out=x)

    def forget(self, kv_slots: list[int], window_slots: list[int] | None = None) -> None:
        """As `CpuDecoder.forget`."""
        self._model.forget(kv_slots, window_slots)

    @property
    def expert_token_counts(self) -> npt.NDArray[np.int64]:
        """[layers, experts]: tokens routed to each expert since the start."""
        counts: npt.NDArray[np.int64] = self._model.expert_token_counts[:, 0].numpy()
        return counts

    def weight_bytes_read(self) -> int:
        """Bytes of weights that the steps so far had to read: each distinct expert once a step."""
        return self._model.weight_bytes_read()

    def read(self) -> tuple[float, int]:
        """One plain read of these layers' experts: seconds taken, bytes read."""
        return self._model.read_experts()

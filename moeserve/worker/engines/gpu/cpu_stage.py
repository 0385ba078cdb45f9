"""The CPU stage: the first layers of a model run on the CPU if their dense parts do not fit on the GPU.

    CPU pool   embedding · layer 0 · … · layer k-1 │            (the RAM experts of the GPU's layers)
    PCIe                                            │ x │
    GPU                                                 │ layer k · … · head

k may be 0: then only the embedding is in RAM. A step's rows are copied to the GPU once, as the residual stream x
[rows, hidden]. The pool also computes RAM experts for the GPU, in the order of the calls: `compute` comes before
`GpuDecoder.begin`.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.observer import LayerObserver
from moeserve.worker.engines.cpu.engine import launch
from moeserve.worker.engines.request_embeddings import EmbeddedStep
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class CpuStage:
    """Owns the CPU's layers, their KV, and x."""

    def __init__(self, stream: CpuStream, model: CpuDecoder) -> None:
        self._stream = stream
        self._model = model
        self.ms = 0.0  # that the last step's layers took

    @property
    def num_layers(self) -> int:
        return len(self._model.expert_token_counts)

    @property
    def x(self) -> Tensor:
        """Returns float32 [max_tokens, hidden], pinned: the GPU reads a step's rows from it."""
        return self._model.x

    def copy_states(self, pairs: Int32s) -> None:
        """Launches copies between slots of recurrent state. pairs: int32 [n, 2] (source, target). Call it before
        `compute`."""
        self._model.copy_states(torch.from_numpy(pairs.copy()))

    def commit_states(self, slots: Int32s, first: Int32s, accepted: Int32s) -> None:
        """Launches the commit of accepted drafts, after their step. slots: state slots of their requests; first: each
        one's first draft, counted over the step's drafts; accepted: number of its accepted drafts. int32 [n] each."""
        if self._model.has_states:
            self._model.commit_states(*map(torch.from_numpy, (slots, first, accepted)))

    def compute(
        self,
        layout: StepLayout,
        sequences: Sequences,
        observer: LayerObserver | None = None,
        embedded: EmbeddedStep | None = None,
    ) -> None:
        """Computes x for the step's rows, and returns when it is done. The GPU must have finished the previous step."""
        began = time.perf_counter()
        launch(layout, sequences, self._model, observer, embedded)
        self._stream.wait()
        self.ms = (time.perf_counter() - began) * 1e3

    def fill_dummy(self, n: int) -> None:
        """Fills x with random rows, for timing the GPU's part: with zeros, routing would be unrepresentative."""
        x = self._model.x[:n].numpy()
        np.random.default_rng(0).standard_normal(dtype=np.float32, out=x)

    def forget(self, kv_slots: list[int], window_slots: list[int] | None = None) -> None:
        """Clears these KV slots and the read counts; see `CpuDecoder.forget`."""
        self._model.forget(kv_slots, window_slots)

    @property
    def expert_token_counts(self) -> npt.NDArray[np.int64]:
        """Returns int64 [layers, experts]: tokens routed to each expert since start-up."""
        counts: npt.NDArray[np.int64] = self._model.expert_token_counts[:, 0].numpy()
        return counts

    def weight_bytes_read(self) -> int:
        """Bytes of weights read by all steps so far; each distinct expert counts once per step."""
        return self._model.weight_bytes_read()

    def read(self) -> tuple[float, int]:
        """Reads these layers' experts once. Returns seconds and bytes."""
        return self._model.read_experts()

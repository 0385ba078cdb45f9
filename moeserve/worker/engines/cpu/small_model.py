"""A small model that drafts on the CPU pool."""

from __future__ import annotations

import torch

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.cpu_step_buffers import CPU_LOGIT_ROWS
from moeserve.models.interface import ModelShape
from moeserve.worker.engines.cpu.engine import launch
from moeserve.worker.engines.small_model import Likeliest
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class CpuSmallModel:
    """See `SmallModel`."""

    most_sequences = CPU_LOGIT_ROWS

    def __init__(self, model: CpuDecoder, stream: CpuStream) -> None:
        self._model = model
        self._stream = stream

    @property
    def shape(self) -> ModelShape:
        return self._model.shape

    @property
    def has_states(self) -> bool:
        return self._model.has_states

    def launch(self, layout: StepLayout, sequences: Sequences) -> None:
        launch(layout, sequences, self._model)

    def wait(self) -> None:
        self._stream.wait()

    def likeliest(self, layout: StepLayout, vocab_size: int) -> Likeliest:
        logits = self._model.logits(torch.from_numpy(layout.sampled_rows))[:, :vocab_size]
        self._stream.wait()
        highest, best = logits.max(dim=1)
        return Likeliest(best.tolist(), (highest - logits.logsumexp(dim=1)).exp().tolist(), logits)

    def copy_states(self, pairs: Int32s) -> None:
        self._model.copy_states(torch.from_numpy(pairs))

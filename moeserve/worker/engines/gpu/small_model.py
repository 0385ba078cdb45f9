"""A small model that drafts on the GPU of the model that it drafts for."""

from __future__ import annotations

import torch

from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.interface import ModelShape
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.small_model import Likeliest
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class GpuSmallModel:
    """See `SmallModel`. Its steps are an engine's of its own, with CUDA graphs, on the same CUDA stream as the large
    model's: the host waits for each draft, because the next step of the small model needs its token."""

    def __init__(self, model: GpuDecoder, engine: GpuEngine) -> None:
        self._model = model
        self._engine = engine
        self.most_sequences = engine.logit_rows

    @property
    def shape(self) -> ModelShape:
        return self._model.shape

    @property
    def has_states(self) -> bool:
        return self._model.has_states

    def launch(self, layout: StepLayout, sequences: Sequences) -> None:
        self._engine.forward(layout, sequences, has_new=False, observer=None)

    def wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def likeliest(self, layout: StepLayout, vocab_size: int) -> Likeliest:
        logits = self._engine.logits(layout, 0)[:, :vocab_size]
        highest, best = logits.max(dim=1)
        shares = (highest - logits.logsumexp(dim=1)).exp()
        tokens, probabilities = torch.stack([best.double(), shares.double()]).cpu().numpy()
        return Likeliest(tokens.astype(int).tolist(), probabilities.tolist(), logits)

    def copy_states(self, pairs: Int32s) -> None:
        self._engine.copy_states(pairs)

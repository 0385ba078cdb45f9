"""The interface of a small model that drafts (--speculative-model): its steps, and what it says after them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from moeserve.models.interface import ModelShape
from moeserve.worker.sequences import Int32s, Sequences, StepLayout


class Likeliest(NamedTuple):
    """What a model says after the last row of each sequence of a step."""

    token_ids: list[int]
    probabilities: list[float]  # of these tokens
    logits: Tensor  # float32 [sequences, vocabulary], on the model's device; the next call may overwrite them


class SmallModel(Protocol):
    """Every call follows the launches before it, on the model's own stream."""

    most_sequences: int  # of a step whose likeliest tokens are read

    @property
    def shape(self) -> ModelShape: ...

    @property
    def has_states(self) -> bool: ...

    def launch(self, layout: StepLayout, sequences: Sequences) -> None:
        """Launches a step over rows that all sample."""
        ...

    def wait(self) -> None:
        """Waits for the launches so far."""
        ...

    def likeliest(self, layout: StepLayout, vocab_size: int) -> Likeliest:
        """Waits for the last step, `layout`, and returns the likeliest token after each sequence, among the first
        `vocab_size` tokens."""
        ...

    def copy_states(self, pairs: Int32s) -> None:
        """Launches copies between slots of recurrent state. pairs: int32 [copies, 2], source and target in order;
        source -1 zeroes the target."""
        ...

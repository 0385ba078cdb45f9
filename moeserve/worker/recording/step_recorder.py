"""What writes down what steps compute: the runner asks it at the start of each step if it wants to see the inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.steps import Sampled, WorkerReady
from moeserve.models.interface import ModelShape
from moeserve.models.observer import LayerObserver
from moeserve.worker.recording.routing_recorder import open_routing_recorder
from moeserve.worker.recording.step_dump import open_dump
from moeserve.worker.sequences import Sequences, StepLayout


class StepRecord(LayerObserver, Protocol):
    """The record of one step."""

    def logits(self, first: int, logits: Tensor) -> None:
        """float32 [m, vocab], of the sampled rows from `first` on, before the sampler changes them."""

    def finish(self, sampled: Sequence[Sampled]) -> None:
        """The step has ended, and these are its tokens."""


class StepRecorder(Protocol):
    def start(self, layout: StepLayout, sequences: Sequences, ready: WorkerReady) -> StepRecord | None:
        """A record of the step that begins now; None: it is of no interest, and as fast as ever."""


def open_recorder(config: ServerConfig, model: ModelShape, rows: int) -> StepRecorder | None:
    """Opens the recorder that the flags ask for; None if they ask for none. rows: of the largest step. Raises
    ConfigError."""
    dump, routing = open_dump(config, model, rows), open_routing_recorder(config, model)
    if dump is not None and routing is not None:
        raise ConfigError("--debug-dump and --record-routing-trace go one at a time")
    return dump or routing

"""The interface of recorders: at the start of each step the runner asks whether it should be recorded."""

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
        """Takes logits, float32 [m, vocab], of the sampled rows from `first` on, before the sampler changes them."""

    def finish(self, sampled: Sequence[Sampled]) -> None:
        """Takes the step's tokens; the step has ended."""


class StepRecorder(Protocol):
    def start(self, layout: StepLayout, sequences: Sequences, ready: WorkerReady) -> StepRecord | None:
        """Returns a record of the step that starts now; None: not recorded, and runs at full speed."""


def open_recorder(config: ServerConfig, model: ModelShape, rows: int) -> StepRecorder | None:
    """Opens the recorder that the flags ask for; None if they ask for none. rows: of the largest step. Raises
    ConfigError."""
    dump, routing = open_dump(config, model, rows), open_routing_recorder(config, model)
    if dump is not None and routing is not None:
        raise ConfigError(
            "--debug-dump and --record-routing-trace cannot be used together; leave one of them out"
        )
    return dump or routing

"""Records the experts to which answer tokens are routed, as a routing trace (`--record-routing-trace`).

One request is followed from its first answer token to its last, then another: consecutive tokens of a trace are
consecutive in a text. Steps without that request run at full speed; its own are launched layer by layer, because
only then can the model be observed. After the requested number of tokens the recorder has no further effect.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.steps import Sampled, WorkerReady
from moeserve.models.interface import ModelShape
from moeserve.models.observer import LayerRouting
from moeserve.placement.expert_cache.routing_trace import MAX_ID_BYTES, RoutingTrace, write_trace
from moeserve.worker.sequences import Sequences, StepLayout

TOKENS = 4096
SAVED_EVERY = 256  # tokens between two saves

log = logging.getLogger(__name__)


def open_routing_recorder(config: ServerConfig, model: ModelShape) -> RoutingRecorder | None:
    """Opens the recorder that the flags ask for; None if they ask for none. Raises ConfigError if the file cannot be
    written."""
    if config.record_routing_trace is None:
        if config.record_routing_tokens is not None:
            raise ConfigError(
                "--record-routing-tokens has no effect alone; name a file with --record-routing-trace"
            )
        return None
    path, tokens = Path(config.record_routing_trace), config.record_routing_tokens or TOKENS
    nbytes = 2 * tokens * model.num_layers * model.top_k
    if not nbytes:
        raise ConfigError("--record-routing-trace: this model has no experts to be routed to; leave it out")
    if nbytes > MAX_ID_BYTES:
        raise ConfigError(
            f"--record-routing-trace: {tokens} tokens take {nbytes} bytes, and {MAX_ID_BYTES} are allowed; say fewer "
            "with --record-routing-tokens"
        )
    if path.exists() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        why = "is there already" if path.exists() else "is in no folder that can be written to"
        raise ConfigError(f"--record-routing-trace: {path} {why}; name a new file")
    log.warning(
        "steps of the request whose routing is recorded are slow until %d tokens of answers are in %s", tokens, path
    )  # fmt: skip
    return RoutingRecorder(path, tokens, model, f"a server's answers, {Path(config.model).name}"[:1024])


class RoutingRecorder:
    """Owns the file. A write error ends the recording, with an error in the log, but not the worker."""

    def __init__(self, path: Path, tokens: int, model: ModelShape, source: str) -> None:
        self._path, self._source, self._experts = path, source, model.num_experts
        # Layers without experts have no routing; their entries contain the ids 0, 1, ...
        self._ids = np.tile(np.arange(model.top_k, dtype=np.uint16), (tokens, model.num_layers, 1))
        self._seen = 0
        self._saved = 0
        self._followed: tuple[int, str] | None = None  # (request slot, request id) of the followed request
        self._is_over = False

    def start(self, layout: StepLayout, sequences: Sequences, ready: WorkerReady) -> RoutingRecord | None:
        """Returns a record of the step that starts now, if it contains an answer token of the followed request; else
        None."""
        if self._is_over:
            return None
        rows = {
            (slot, sequences.request_ids[slot]): offset
            for slot, count, offset in zip(
                layout.req_slot.tolist(), layout.count.tolist(), layout.offset.tolist(), strict=True
            )
            if count == 1
        }
        if self._followed not in rows:
            self._followed = min(rows, default=None)
        if self._followed is None:
            return None
        return RoutingRecord(self, rows[self._followed], self._ids[self._seen])

    def finished(self) -> None:
        """Counts a recorded token."""
        self._seen += 1
        self._is_over = self._seen == len(self._ids)
        if self._is_over or self._seen - self._saved >= SAVED_EVERY:
            self._save()

    def _save(self) -> None:
        self._saved = self._seen
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            write_trace(partial, RoutingTrace(self._source, self._experts, self._ids[: self._seen]))
            partial.replace(self._path)
        except OSError as error:
            self._is_over = True
            log.error("the routing trace ends after %d tokens: %s", self._seen, error)
            return
        if self._is_over:
            log.info("the routing trace is complete: %d tokens in %s", self._seen, self._path)


class RoutingRecord:
    """The record of one step, as the model's `LayerObserver`."""

    def __init__(self, recorder: RoutingRecorder, row: int, ids: npt.NDArray[np.uint16]) -> None:
        """ids: uint16 [layers, top_k], filled with the routing of `row`."""
        self._recorder, self._row, self._ids = recorder, row, ids

    def embedding(self, x: Tensor) -> None:
        pass

    def layer(self, index: int, *, routing: LayerRouting | None, **_: Tensor) -> None:
        if routing is not None:
            self._ids[index] = routing.expert_ids[self._row].cpu().numpy()

    def logits(self, first: int, logits: Tensor) -> None:
        pass

    def finish(self, sampled: Sequence[Sampled]) -> None:
        self._recorder.finished()

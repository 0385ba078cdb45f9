"""EngineState: whether the engine takes requests, and the engine's reports about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.engine.silences import Silences
from moeserve.httpserver.generation.engine.slow_disk import SlowDisk
from moeserve.httpserver.observability.metrics import Status
from moeserve.httpserver.transport.errors import ApiError, shutting_down
from moeserve.messages.refusal import Refusal
from moeserve.messages.schema import LoadProgress
from moeserve.messages.steps import WorkerReady


class Health(TypedDict):
    """The answer of /health. It has `stage` and `fraction` while the model is being loaded, `cause` while the engine is
    restarted or does not respond, and `note` while the engine is slower than it could be."""

    status: Status
    stage: NotRequired[str]
    fraction: NotRequired[float]
    cause: NotRequired[str]
    note: NotRequired[str]


@dataclass
class EngineState:
    """`server.py` writes the first three fields, `EngineClient` the others."""

    text_ready: bool = False  # the tokenizer is built
    leaving: bool = False  # no longer reported as ready
    draining: bool = False  # no new requests
    ready: WorkerReady | None = None
    lost: str | None = None  # why the router or worker is gone at the moment; None before the first start
    lost_detokenizer: str | None = None  # the same for the detokenizer
    silences: Silences = field(default_factory=Silences)  # its `watch` must be running
    slow_disk: SlowDisk = field(default_factory=SlowDisk)
    progress: LoadProgress = field(default_factory=lambda: LoadProgress("starting", 0, 0))

    @property
    def status(self) -> Status:
        if self.leaving or self.draining:
            return "draining"
        if self.ready is None or not self.text_ready:
            return "loading"
        if self.silences.longest is not None:
            return "unresponsive"
        return "ok" if self.lost is None and self.lost_detokenizer is None else "restarting"

    @property
    def is_lost(self) -> bool:
        """True if a process of the engine is lost, whether or not the launcher is replacing it."""
        return self.status not in ("ok", "draining")

    def health(self) -> Health:
        health: Health = {"status": self.status}
        if health["status"] == "ok" and self.slow_disk.note is not None:
            health["note"] = self.slow_disk.note
        if health["status"] == "restarting":
            health["cause"] = self.lost or self.lost_detokenizer or ""
        if health["status"] == "unresponsive":
            health["cause"] = f"the {self.silences.longest} says nothing"
        if health["status"] in ("loading", "restarting"):
            only_text = self.ready is not None and self.lost is None
            health["stage"] = "tokenizer" if only_text else self.progress.stage
            total = self.progress.total
            health["fraction"] = 1.0 if only_text else (self.progress.done / total if total else 0.0)
        return health

    def require_ready(self) -> WorkerReady:
        """Returns the engine's limits. Raises ApiError 503 if no request can be queued. While the engine restarts,
        requests are queued: they wait for the new worker."""
        if self.status == "unresponsive":
            raise ApiError(
                503, "the engine does not respond; try again in a few seconds", code="unresponsive"
            )
        if self.draining:
            raise shutting_down()
        if self.ready is None or not self.text_ready:
            health = self.health()
            message = f"the model is loading: {health['stage']}, {health['fraction']:.0%}"
            raise ApiError(503, message, code="loading", refusal=Refusal.LOADING)
        return self.ready

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus answer that can run, in tokens: the model's limit, or the KV pool if it is
        smaller."""
        return None if self.ready is None else min(self.ready.max_model_len, self.ready.num_kv_slots)

"""What every route works with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from moeserve.config import ServerConfig
from moeserve.grammar.checker import GrammarChecker
from moeserve.httpserver.generation.engine_client import EngineClient
from moeserve.httpserver.generation.model_text import ModelText
from moeserve.httpserver.generation.request_builder import Admission
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.responses.store import ResponseStore
from moeserve.httpserver.transport.errors import ApiError


@dataclass
class Service:
    config: ServerConfig
    model_name: str
    engine: EngineClient
    metrics: Metrics
    responses: ResponseStore
    text: ModelText | None = None  # built by `server.py` while /health already answers
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        most = self.config.max_num_queued_reqs + self.config.max_num_seqs
        self.admission = Admission(self.engine, self.config.seed, most)
        self.grammars = GrammarChecker(Path(self.config.model))

    def ready(self, model: str | None) -> tuple[ModelText, int]:
        """The tokenizer and the longest prompt plus answer. Raises ApiError: 404 for a model that is not the
        served one, 503 unless a request could run now."""
        if model is not None and model != self.model_name:
            raise self.unknown_model(model)
        self.engine.require_ready()
        limit = self.engine.max_model_len
        assert self.text is not None  # require_ready has passed
        assert limit is not None
        return self.text, limit

    def unknown_model(self, model: str) -> ApiError:
        message = f"the model {model[:200]!r} does not exist; served is {self.model_name!r}"
        return ApiError(404, message, param="model", code="model_not_found")


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service

"""ModelLines: the server with one model as `BatchRunner` sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeserve.httpserver.batches.line_request import Answered, LineAnswerer
from moeserve.httpserver.batches.runner import BatchServer
from moeserve.httpserver.generation.service import Service


class ModelLines(BatchServer):
    def __init__(self, service: Service, answerer: LineAnswerer) -> None:
        self._service = service
        self._answerer = answerer
        self.keys = service.keys
        self.counts = service.metrics
        self.most_at_once = service.config.max_num_seqs

    @property
    def is_busy(self) -> bool:
        return not self._service.engine.room.is_empty

    @property
    def knows_its_models(self) -> bool:
        return self._service.engine.state.ready is not None

    def has_model(self, name: str) -> bool:
        return self._service.has_model(name)

    async def answer(self, path: str, body: Mapping[str, Any], tenant: str, owner: str) -> Answered:
        return await self._answerer.answer(path, body, tenant, owner)

"""Service: the objects that every route uses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from moeserve.config import ServerConfig
from moeserve.grammar.checker import GrammarChecker
from moeserve.httpserver.documents.pdf_reader import PdfReader
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.picture_client import PictureClient
from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.generation.request.sampling_defaults import SamplingDefaults
from moeserve.httpserver.generation.resolve.request_builder import RequestBuilder
from moeserve.httpserver.generation.resolve.served import Served
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.observability.shared_scrape import SharedScrape
from moeserve.httpserver.transport.api_table import ApiState
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.httpserver.transport.keys import ApiKeys
from moeserve.messages.adapters import ServedAdapter


@dataclass
class Service:
    config: ServerConfig
    model_name: str
    engine: EngineClient
    metrics: Metrics
    api_states: Mapping[str, ApiState]  # by Api.name; each API reads its own only
    aliases: Set[str] = frozenset()  # further names of the model
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    keys: ApiKeys | None = None  # written by `build_app`
    text: ModelText | None = None  # set by `server.py` once it is built; None while the server is loading
    created: int = field(default_factory=lambda: int(time.time()))
    # Models that clients have downloaded and that this server does not serve: their paths, by name.
    downloaded: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.max_generations = (
            self.config.max_num_queued_reqs + self.config.max_num_seqs
        )  # running and waiting
        self.request_builder = RequestBuilder(self.engine.next_id, self.config.seed)
        self.scrape = SharedScrape(lambda: self.metrics.render(self.engine.state.status))
        self.grammars = GrammarChecker(Path(self.config.model), serves_others=self.engine.serves_others)
        self.pdfs = PdfReader()

    def ready(self, model: str | None) -> Served:
        """Returns the model and its limits. Raises ApiError: 404 for an unknown model, 503 if no request can be queued
        now."""
        if model is not None and not self.has_model(model):
            raise self.unknown_model(model)
        ready = self.engine.state.require_ready()
        limit = self.engine.state.max_model_len
        assert self.text is not None  # require_ready has passed
        assert limit is not None
        return Served(self.text, limit, min(ready.vocab_size, self.text.vocab_size), ready.max_num_seqs)

    def picture_client(self, asked: Asked) -> PictureClient | None:
        """Returns the client of the visual server; None if the model does not see pictures. Raises ApiError 400 for a
        prompt with pictures if this engine cannot compute them."""
        ready = self.engine.state.ready
        if (
            asked.pictures
            and self.engine.pictures is not None
            and ready is not None
            and not ready.embedding_size
        ):
            raise invalid(
                asked.prompt_param,
                "contains a picture, which neither several GPUs nor a remote worker compute so far",
            )
        return self.engine.pictures

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        """Returns the LoRA adapters that are loaded now, by name."""
        return self.engine.adapters.by_name

    def has_model(self, name: str) -> bool:
        """Returns whether `name` is the model, an alias of it or one of its adapters."""
        return name == self.model_name or name in self.aliases or name in self.adapters

    def adapter_of(self, model: str | None) -> str:
        """Returns `GenerateRequest.adapter` for a request that names `model`. Raises ApiError 404 if the adapter has
        been unloaded since `ready`."""
        if model is None or model == self.model_name or model in self.aliases:
            return ""
        if model not in self.adapters:
            raise self.unknown_model(model)
        return self.adapters[model].key

    def answering(self, model: str | None) -> str:
        """Returns the name in the answer to a request that names `model`: the adapter's name, or the model's first
        name."""
        return self.model_name if model is None or model in self.aliases else model

    def unknown_model(self, model: str) -> ApiError:
        served = ", ".join(map(repr, (self.model_name, *self.adapters)))
        message = (
            f"the model {model[:200]!r} does not exist; served {'are' if self.adapters else 'is'} {served}"
        )
        if model in self.downloaded:
            message = f"the model {model!r} is downloaded but not served: {self.how_to_serve(model)}"
        return ApiError(404, message, param="model", code="model_not_found")

    def how_to_serve(self, name: str) -> str:
        """Returns a sentence that says how a downloaded model can be served."""
        return (
            f"this server has one model, {self.model_name!r}; stop it, and start `moeserve serve {name}`, or "
            f"`moeserve serve MODEL {name}` for both"
        )


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service

"""The front's application. It checks requests as every server does, answers some requests itself and passes the others
on.

API key, body size and path are checked before a request can cause a model to be loaded.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from moeserve.config import ServerConfig
from moeserve.front import lists, model_events, probes
from moeserve.front.adapters import LOAD, UNLOAD, LoadedAdapters
from moeserve.front.downloaded import DownloadedModels
from moeserve.front.file_looks import FileLooks
from moeserve.front.metrics import FrontMetrics
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.front.relay import Relay
from moeserve.front.requested_model import Asked, asked_in
from moeserve.front.schedule import State
from moeserve.httpserver import batches as batch_api
from moeserve.httpserver import mcp, native, web
from moeserve.httpserver.app import APIS, Application, answer_errors, defend, note_requests
from moeserve.httpserver.batches.store import BatchStore
from moeserve.httpserver.mcp.servers import McpServers
from moeserve.httpserver.observability.shared_scrape import SharedScrape
from moeserve.httpserver.ollama import pull_routes
from moeserve.httpserver.ollama.pulls import Pulls
from moeserve.httpserver.responses.routes import RESPONSES
from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.hosts import KnownHost, is_loopback
from moeserve.httpserver.transport.keys import ApiKeys
from moeserve.httpserver.transport.middleware import HeadAsGet
from moeserve.httpserver.transport.request_state import state_of
from moeserve.httpserver.transport.sse import JsonResponse
from moeserve.httpserver.transport.unknown_fields import UnknownFields

# Paths of questions about a model, which do not load it: a client may ask about each model of a list.
QUESTIONS: Final = frozenset({"/api/show"})
# Paths of stored responses: one model's server has the response, and the path does not name the model.
STORED: Final = f"{RESPONSES}/"
CANCEL: Final = "/cancel"


class FrontApplication(FastAPI):
    """`apis` and `paths` have the same meaning as in `Application`."""

    def __init__(
        self,
        pool: ModelPool,
        config: ServerConfig,
        keys: ApiKeys,
        metrics: FrontMetrics,
        downloaded: DownloadedModels,
        adapters: LoadedAdapters,
        batches: BatchStore | None,
        looks: FileLooks,
    ) -> None:
        """`config`: the front's own configuration. `batches`: None without --batch-dir."""
        super().__init__(title="moeserve", docs_url=None, redoc_url=None, openapi_url=None)
        # The routes of a model's server. The front knows the paths, and the model's server answers them.
        self._routes = Application(APIS, wants_key=bool(keys), model=pool.models[0].name)
        self.apis = self._routes.apis
        self.state.pool = pool
        self.state.created = int(time.time())
        self.state.file_looks = looks
        self.state.scrape = SharedScrape(metrics.render)
        self.state.unknown_fields = UnknownFields(config.unknown_fields, lambda route, count: None)
        self.state.mcp = McpServers(config.mcp_servers, config.mcp_headers_file)
        self.state.batches = batches
        self.state.pulls = Pulls(config.pull == "allow", downloaded)
        self.paths = set(self._routes.paths)
        self._pool = pool
        self._adapters = adapters
        self._relay = self.state.relay = Relay(pool, self.apis)
        own = (
            probes.router,
            lists.router,
            model_events.router,
            pull_routes.router,
            mcp.routes.router,
            web.pages.router,
        )
        for router in (*own, *batch_api.API.routers):
            self.include_router(router)
            self.paths |= {route.path for route in router.routes if isinstance(route, Route)}
        self.router.routes.append(Route("/openapi.json", self._routes.answer_document))
        self.router.default = self._pass_on
        answer_errors(self)
        defend(self, self.apis, config, keys, context=lambda: None)
        note_requests(self, self.apis, metrics, None)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to its model's server, on every path that the front does not answer itself. Raises ApiError,
        HTTPException."""
        self._require_route(scope)
        request = Request(scope, receive)
        path, query = scope["path"], scope["query_string"]
        if path.startswith(STORED) and (scope["method"] != "POST" or path.endswith(CANCEL)):
            await self._relay.answer_if_loaded(scope, receive, send, await self._holder(scope))
            return
        body = await request.body()
        asked = await asked_in(path, query, body)
        if path in (LOAD, UNLOAD) and scope["method"] == "POST":
            await self._change_adapters(scope, receive, send, asked, body)
            return
        model = self._pool.find(asked.model)
        state_of(scope).admit()
        if path == "/props" and asked.model is None and not model.answers_questions:
            await JsonResponse(lists.props_of_all(model))(scope, receive, send)
        elif scope["method"] != "POST" or path in QUESTIONS:
            await self._answer_question(scope, receive, send, model, body)
        elif asked.only_loads and asked.keep_alive == 0:
            self._unload(model)
            await JsonResponse(lists.ollama_unloaded(body, path))(scope, receive, send)
        else:
            await self._relay.answer(scope, receive, send, model, asked, body)

    def _require_route(self, scope: Scope) -> None:
        found = Match.NONE
        for route in self._routes.router.routes:
            match, child = route.matches(scope)
            found = max(found, match, key=lambda one: one.value)
            if match is Match.FULL:
                scope["route"] = child.get("route", route)
                return
        status = HTTPStatus.METHOD_NOT_ALLOWED if found is Match.PARTIAL else HTTPStatus.NOT_FOUND
        raise HTTPException(status)

    async def _answer_question(
        self, scope: Scope, receive: Receive, send: Send, model: PooledModel, body: bytes
    ) -> None:
        if scope["path"] == "/api/show" and model.state is not State.LOADED:
            (file,) = await lists.files_of(self.state, [model])
            await JsonResponse(lists.shown_unloaded(model, file))(scope, receive, send)
            return
        await self._relay.answer_if_loaded(scope, receive, send, model, body)

    async def _change_adapters(
        self, scope: Scope, receive: Receive, send: Send, asked: Asked, body: bytes
    ) -> None:
        """Loads or unloads a LoRA adapter. Loading an adapter loads its model first."""
        path = scope["path"]
        model = await self._adapters.model_for(path, asked.model, body)
        state_of(scope).admit()
        if path == UNLOAD and (said := self._adapters.forget(model, body)) is not None:
            await PlainTextResponse(said)(scope, receive, send)
            return

        async def send_when_known(message: Message) -> None:
            self._adapters.look()  # the names are known before the client has the answer
            await send(message)

        # Not sent again: an adapter that is loaded twice is an error.
        await self._relay.answer(scope, receive, send_when_known, model, asked, body, is_repeatable=False)

    def _unload(self, model: PooledModel) -> None:
        """Unloads the model. As in Ollama, it is not an error if the model is not loaded."""
        if model.state in (State.LOADED, State.LOADING):
            self._pool.unload(model)

    async def _holder(self, scope: Scope) -> PooledModel:
        """Returns the loaded model whose server stores the response that the path names. Raises ApiError 404."""
        path = scope["path"].removesuffix(CANCEL)
        as_get = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        for model in self._pool.models:
            if model.answers_questions and await self._relay.has(as_get, model):
                return model
        message = "no loaded model has this response; responses of a model that is not loaded cannot be read"
        raise ApiError(404, message, code="response_not_found")


class FrontProbes(FastAPI):
    """The application of --health-port, which needs no key."""

    def __init__(self, front: FrontApplication, config: ServerConfig, metrics: FrontMetrics) -> None:
        super().__init__(title="moeserve", docs_url=None, redoc_url=None, openapi_url=None)
        self.apis = ApiTable((native.PROBES,))
        self.paths = {route.path for route in probes.router.routes if isinstance(route, Route)}
        for name in ("pool", "scrape", "relay"):
            setattr(self.state, name, getattr(front.state, name))
        self.include_router(probes.router)
        answer_errors(self)
        self.add_middleware(HeadAsGet)
        if is_loopback(config.host):
            self.add_middleware(KnownHost, apis=self.apis, allowed=config.allowed_host)
        note_requests(self, self.apis, metrics, None)

"""The FastAPI application: the table of APIs, the middleware around them, and the answers to errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from moeserve.config import ServerConfig
from moeserve.httpserver import (
    anthropic,
    batches,
    lightllm,
    llama_server,
    mcp,
    native,
    ollama,
    openai,
    responses,
    web,
)
from moeserve.httpserver.batches.queries import batch_store
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.mcp.servers import McpServers
from moeserve.httpserver.observability.access import Access, AnswerCounts
from moeserve.httpserver.observability.request_record import record_of
from moeserve.httpserver.ollama.downloaded import DownloadedBeside
from moeserve.httpserver.ollama.pulls import Pulls
from moeserve.httpserver.transport.absent_paths import why_absent
from moeserve.httpserver.transport.api_table import Api, ApiTable
from moeserve.httpserver.transport.decompress import Decompress
from moeserve.httpserver.transport.documented_route import whole_routes
from moeserve.httpserver.transport.errors import CLIENT_CLOSED_REQUEST, ApiError, shown
from moeserve.httpserver.transport.hosts import KnownHost, is_loopback
from moeserve.httpserver.transport.keys import ApiKeys
from moeserve.httpserver.transport.middleware import ApiKey, BodyLimit, HeadAsGet, RequestId
from moeserve.httpserver.transport.open_requests import OpenRequests
from moeserve.httpserver.transport.openapi import complete
from moeserve.httpserver.transport.origins import ForeignPages
from moeserve.httpserver.transport.refuse import note_refusal, request_id_of
from moeserve.httpserver.transport.sse import JsonResponse
from moeserve.httpserver.transport.unknown_fields import UnknownFields
from moeserve.messages.refusal import Refusal
from moeserve.processes.sandbox.parent import SandboxUnavailable
from moeserve.processes.tracing import Tracer

# The only place that lists the APIs. /openapi.json has them in this order.
APIS: Final[tuple[Api, ...]] = (
    openai.API,
    responses.API,
    anthropic.API,
    batches.API,
    lightllm.API,
    llama_server.API,
    ollama.API,
    native.API,
    mcp.API,
    web.API,
)


class Application(FastAPI):
    """The routes of all APIs, documented at /openapi.json. FastAPI's own documentation pages are off because they load
    scripts from another site; `web` serves /docs."""

    def __init__(self, apis: Iterable[Api] = APIS, *, wants_key: bool = False, model: str = "model") -> None:
        """wants_key: requests without an API key are refused. model: the served model's name, for the examples."""
        super().__init__(title="moeserve", docs_url=None, redoc_url=None, openapi_url=None)
        self.apis = ApiTable(apis)
        self._wants_key = wants_key
        self._model = model
        self._document: bytes | None = None  # the answer to GET /openapi.json
        self._document_lock = asyncio.Lock()
        self.router.routes.append(Route("/openapi.json", self.answer_document, include_in_schema=False))
        self.paths: set[str] = set()  # paths of all routes, parameters written as `{name}`
        for api in self.apis.apis:
            for router in api.routers:
                # Not include_router(): that would analyse each route's function again, 0.15 s of the start.
                self.router.routes.extend(router.routes)
                routes = [route for route in router.routes if isinstance(route, Route)]
                self.paths |= {route.path for route in routes}
                # Probes come first: FastAPI's search through all routes would be the largest part of a probe's cost.
                probes = [route for route in routes if route.path in api.probe_paths]
                self.router.routes[:0] = [Route(probe.path, probe.endpoint) for probe in probes]

    async def answer_document(self, request: Request) -> Response:
        """Answers GET /openapi.json. The document is made once, on a thread: it takes a third of a second, in which the
        event loop serves other requests."""
        async with self._document_lock:
            if self._document is None:
                self._document = await asyncio.to_thread(lambda: orjson.dumps(self.openapi()))
        return Response(self._document, media_type=JsonResponse.media_type)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            routes = whole_routes(self.routes)
            document = get_openapi(title=self.title, version=self.version, routes=routes)
            complete(document, self.apis, wants_key=self._wants_key, model=self._model)
            self.openapi_schema = document
        return self.openapi_schema


def openapi_document() -> dict[str, Any]:
    """Returns the answer to GET /openapi.json."""
    return Application().openapi()


def build_app(service: Service, apis: Iterable[Api] = APIS) -> FastAPI:
    """Builds the application. Raises ConfigError for an invalid file of API keys or an invalid --mcp-servers."""
    keys = service.keys = ApiKeys.from_config(service.config)
    app = Application(apis, wants_key=bool(keys), model=service.model_name)
    app.state.service = service
    app.state.unknown_fields = UnknownFields(service.config.unknown_fields, service.metrics.unknown_fields)
    app.state.mcp = McpServers(service.config.mcp_servers, service.config.mcp_headers_file)
    app.state.pulls = Pulls(service.config.pull == "allow", DownloadedBeside(service))
    app.state.batches = batch_store(service)
    answer_errors(app)
    # With pictures the bound on bodies does not depend on the context, because a picture's size in bytes does not
    # determine its number of tokens.
    sees = service.config.mmproj is not None
    defend(
        app,
        app.apis,
        service.config,
        keys,
        context=lambda: None if sees else service.engine.state.max_model_len,
    )
    note_requests(app, app.apis, service.metrics, service.engine.tracer)
    return app


def defend(
    app: FastAPI, apis: ApiTable, config: ServerConfig, keys: ApiKeys, *, context: Callable[[], int | None]
) -> None:
    """Adds the middleware that bounds and refuses requests before they reach a route. context: see `BodyLimit`. The
    middleware added last runs first."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, apis=apis, context=context)
    app.add_middleware(Decompress, apis=apis)
    app.add_middleware(ForeignPages, apis=apis, allowed=config.allowed_origin)
    if keys:
        most = config.max_requests_per_key or config.max_num_queued_reqs + config.max_num_seqs
        app.add_middleware(OpenRequests, apis=apis, most=most)
        app.add_middleware(ApiKey, apis=apis, keys=keys)
    elif is_loopback(config.host):
        app.add_middleware(KnownHost, apis=apis, allowed=config.allowed_host)
    if config.allowed_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*", "x-request-id", "retry-after"],
        )


def build_probe_app(service: Service) -> FastAPI:
    """The application of --health-port, which needs no key."""
    app = Application((native.PROBES,))
    app.state.service = service
    answer_errors(app)
    app.add_middleware(HeadAsGet)
    if is_loopback(service.config.host):
        app.add_middleware(KnownHost, apis=app.apis, allowed=service.config.allowed_host)
    note_requests(app, app.apis, service.metrics, service.engine.tracer)
    return app


def answer_errors(app: FastAPI) -> None:
    """Adds the answers to exceptions. `app` has the attributes `apis` and `paths` of `Application`."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(MemoryError, _no_memory)
    app.add_exception_handler(SandboxUnavailable, _unavailable)
    app.add_exception_handler(Exception, _bug)


def note_requests(app: FastAPI, apis: ApiTable, metrics: AnswerCounts, tracer: Tracer | None) -> None:
    """Adds the outermost middleware."""
    app.add_middleware(Access, metrics=metrics, tracer=tracer, quiet_paths=apis.quiet_paths)
    app.add_middleware(RequestId, apis=apis)


def _respond(request: Request, error: ApiError) -> Response:
    record = record_of(request.scope)
    if not record.error:
        record.error = error.message
    note_refusal(request.scope, error)
    body = request.app.apis.error_body(request.url.path, error, request_id_of(request))
    return JsonResponse(body, status_code=error.status, headers=error.headers())


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers an error that FastAPI raises: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path[:200]}: {phrase}{_explanation(request)}"
    response = _respond(request, ApiError(error.status_code, message, code=phrase.replace(" ", "_")))
    response.headers.update(error.headers or {})
    return response


def _explanation(request: Request) -> str:
    """Returns the reason why an API's path is not served, or the path that the client probably meant (its base URL
    lacks /v1, has /v1 twice or has a slash too many); for a browser's question on behalf of another site's page (a CORS
    preflight), how to allow it. Returns "" for any other path."""
    given, origin = request.url.path, request.headers.get("origin")
    if request.method == "OPTIONS" and origin is not None:
        return f": pages of {shown(origin)} are allowed by --allowed-origin alone"
    if reason := why_absent(given):
        return f": {reason}"
    paths = request.app.paths - {"/"}
    for path in (f"/v1{given}", given.removeprefix("/v1"), given.replace("//", "/")):
        if path != given and path in paths:
            return f"; did you mean {path}? Look at the client's base URL"
    return ""


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(
        status_code=CLIENT_CLOSED_REQUEST
    )  # the client disconnected while it sent its body, so this answer is not read


async def _no_memory(request: Request, error: Exception) -> Response:
    """Answers a request for which --max-process-memory leaves no room."""
    message = "the server has no memory for this request: make it smaller, or try again later"
    return _respond(request, ApiError(503, message, code="out_of_memory", refusal=Refusal.MEMORY))


async def _unavailable(request: Request, error: Exception) -> Response:
    """Answers a request that needs a process that is not running at the moment."""
    return _respond(request, ApiError(503, f"{error}; try again later", code="unavailable"))


async def _bug(request: Request, error: Exception) -> Response:
    """Answers an unexpected exception. uvicorn logs the traceback; the client does not see it. This answer bypasses our
    middleware."""
    identity = request_id_of(request)
    cause = f"internal error; the server's log has the cause, under the request id {identity}"
    response = _respond(request, ApiError(500, cause, code="internal_error"))
    response.headers["x-request-id"] = identity
    return response

"""The FastAPI application: routes, middleware, and errors in OpenAI's shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from moeserve.httpserver.anthropic import routes as messages
from moeserve.httpserver.anthropic.bodies import CountTokensRequest, MessagesRequest
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.lightllm import routes as generate
from moeserve.httpserver.lightllm.bodies import GenerateRequestBody
from moeserve.httpserver.native import experts, status, tokenize
from moeserve.httpserver.native.bodies import DetokenizeRequest, TokenizeRequest
from moeserve.httpserver.observability.access import Access
from moeserve.httpserver.observability.request_record import record_of_request
from moeserve.httpserver.openai import chat, completions
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.httpserver.openai.completion_body import CompletionRequest
from moeserve.httpserver.responses import routes as openai_responses
from moeserve.httpserver.responses.bodies import InputTokensRequest, ResponsesRequest
from moeserve.httpserver.transport.body import add_schemas
from moeserve.httpserver.transport.errors import ApiError, error_body
from moeserve.httpserver.transport.hosts import KnownHost, is_loopback
from moeserve.httpserver.transport.keys import ApiKeys
from moeserve.httpserver.transport.middleware import ApiKey, BodyLimit, RequestId, request_id_of
from moeserve.httpserver.transport.sse import JsonResponse
from moeserve.httpserver.web import pages

_BODIES = (
    CompletionRequest,
    ChatCompletionRequest,
    GenerateRequestBody,
    ResponsesRequest,
    InputTokensRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


class Application(FastAPI):
    """All routes. No documentation pages: the framework's load scripts from another site; /openapi.json has it all."""

    def __init__(self) -> None:
        super().__init__(title="moeserve", docs_url=None, redoc_url=None)
        self.paths: set[str] = set()  # of all routes; those with a parameter as they were written
        for module in (
            completions,
            chat,
            openai_responses,
            messages,
            generate,
            tokenize,
            experts,
            status,
            pages,
        ):
            self.include_router(module.router)
            self.paths |= {route.path for route in module.router.routes if isinstance(route, Route)}

    def openapi(self) -> dict[str, Any]:
        """With the request bodies, which the routes read by themselves, and without the framework's own 422."""
        if self.openapi_schema is None:
            schema = super().openapi()
            add_schemas(schema, _BODIES)
            for methods in schema["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def openapi_document() -> dict[str, Any]:
    """What GET /openapi.json answers."""
    return Application().openapi()


def build_app(service: Service) -> FastAPI:
    """Raises ConfigError for a bad file of API keys."""
    app = Application()
    app.state.service = service
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
    # The last one added is the first one run.
    app.add_middleware(BodyLimit, context=lambda: service.engine.max_model_len)
    keys = ApiKeys.from_config(service.config)
    if keys:
        app.add_middleware(ApiKey, keys=keys)
    elif is_loopback(service.config.host):
        app.add_middleware(KnownHost, allowed=service.config.allowed_host)
    app.add_middleware(Access, metrics=service.metrics, tracer=service.engine.tracer)
    app.add_middleware(RequestId)
    return app


def _respond(request: Request, error: ApiError) -> Response:
    if (record := record_of_request.get()) is not None and not record.error:
        record.error = error.message
    body = error_body(request.url.path, error, request_id_of(request))
    return JsonResponse(body, status_code=error.status, headers=error.headers())


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path[:200]}: {phrase}{_meant(request)}"
    response = _respond(request, ApiError(error.status_code, message, code=phrase.replace(" ", "_")))
    response.headers.update(error.headers or {})
    return response


def _meant(request: Request) -> str:
    """The path that a client meant whose base URL lacks /v1, or has it or a slash too much; "" if there is none."""
    given = request.url.path
    paths = request.app.paths - {"/"}
    for path in (f"/v1{given}", given.removeprefix("/v1"), given.replace("//", "/")):
        if path != given and path in paths:
            return f"; did you mean {path}? Look at the client's base URL"
    return ""


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # while it sent its body; nobody reads this


async def _bug(request: Request, error: Exception) -> Response:
    """uvicorn logs the traceback; the client gets none of it. This answer goes past our middleware."""
    identity = request_id_of(request)
    cause = f"internal error; the server's log has the cause, under the request id {identity}"
    response = _respond(request, ApiError(500, cause, code="internal_error"))
    response.headers["x-request-id"] = identity
    return response

"""Health and metrics of a server with several models."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.front.relay import Relay
from moeserve.front.schedule import State
from moeserve.httpserver.observability.shared_scrape import SharedScrape
from moeserve.httpserver.transport.errors import RETRY_AFTER_S
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["Status"])


FrontStatus = Literal["ok", "waiting", "draining", "failed"]


class FrontHealth(TypedDict):
    """The answer of /health. status `failed`: no model can be loaded; `waiting`: requests are taken, and wait until the
    server before this one has ended, which has models in memory. models: each model's state, or `failed` if the model's
    last load failed, or `not_answering` while the server of a loaded model answers nothing: its requests wait until a
    process of it was resumed or replaced."""

    status: FrontStatus
    models: dict[str, str]


def health_of(pool: ModelPool) -> FrontHealth:
    failed = [model for model in pool.listed if _state_of(model) == "failed"]
    status: FrontStatus = "ok"
    if pool.is_draining:
        status = "draining"
    elif not pool.may_load.is_set():
        status = "waiting"
    elif len(failed) == len(pool.listed):
        status = "failed"
    return {"status": status, "models": {model.name: _state_of(model) for model in pool.listed}}


def _state_of(model: PooledModel) -> str:
    if model.failure and model.state is State.UNLOADED:
        return "failed"
    return str(model.state) if model.is_answering else "not_answering"


def pool_of(request: Request) -> ModelPool:
    pool: ModelPool = request.app.state.pool
    return pool


@router.get("/health", responses={200: {"model": FrontHealth}, 503: {"model": FrontHealth}})
async def health(request: Request) -> Response:
    """200 while requests are taken, with or without loaded models; 503 in a drain, or if no model can be loaded."""
    return _answer(health_of(pool_of(request)), frozenset({"ok", "waiting"}))


@router.get("/health/ready", responses={200: {"model": FrontHealth}, 503: {"model": FrontHealth}})
async def ready(request: Request) -> Response:
    """Answers like /health, and with 503 also during an upgrade, while the old server may still load models."""
    return _answer(health_of(pool_of(request)), frozenset({"ok"}))


def _answer(body: FrontHealth, good: frozenset[str]) -> Response:
    if body["status"] in good:
        return JsonResponse(body)
    return JsonResponse(body, status_code=503, headers={"retry-after": RETRY_AFTER_S})


@router.get("/health/live", responses={200: {"model": FrontHealth}})
async def live(request: Request) -> Response:
    """200 while this process answers."""
    return JsonResponse(health_of(pool_of(request)))


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus text: the front's own metrics; with ?model=NAME, the metrics of a loaded model."""
    if (name := request.query_params.get("model")) is not None:
        return _OfModel(request.app.state.relay, pool_of(request).find(name))
    scrape: SharedScrape[tuple[bytes, str]] = request.app.state.scrape
    text, content_type = await scrape.text()
    return Response(text, media_type=content_type)


class _OfModel(Response):
    """The answer of a model's own server to this path."""

    def __init__(self, relay: Relay, model: PooledModel) -> None:
        super().__init__()
        self._relay = relay
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._relay.answer_if_loaded(scope, receive, send, self._model)

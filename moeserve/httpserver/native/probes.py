"""/health and /metrics, for load balancers and scrapers. They answer while the model is still loading."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.engine.engine_state import Health
from moeserve.httpserver.generation.service import service_of
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import RETRY_AFTER_S
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["Status"], route_class=DocumentedRoute)


@router.get("/health", responses={200: {"model": Health}, 503: {"model": Health}})
async def health(request: Request) -> Response:
    """200 when requests can run; else 503 with the loading stage, or with the reason why the engine is restarted."""
    body = service_of(request).engine.state.health()
    if body["status"] == "ok":
        return JsonResponse(body)
    return JsonResponse(body, status_code=503, headers={"retry-after": RETRY_AFTER_S})


@router.get("/health/ready", responses={200: {"model": Health}, 503: {"model": Health}})
async def ready(request: Request) -> Response:
    """Says whether a load balancer may send requests here. The same as /health."""
    return await health(request)


@router.get("/health/live", responses={200: {"model": Health}, 503: {"model": Health}})
async def live(request: Request) -> Response:
    """200 while this process answers, whatever the engine's state: the launcher replaces lost processes. 503 if the
    launcher itself has hung for too long."""
    engine = service_of(request).engine
    is_abandoned = engine.state.is_lost and engine.state.silences.launcher.is_silent
    return JsonResponse(engine.state.health(), status_code=503 if is_abandoned else 200)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus text; vLLM's names under `moeserve:`."""
    text, content_type = await service_of(request).scrape.text()
    return Response(text, media_type=content_type)

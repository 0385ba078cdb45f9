"""/api/pull and /api/delete: download models of the Hugging Face Hub to its cache, and delete them. Off without --pull
allow."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.ollama.bodies import DeleteBody, PullBody, served_name
from moeserve.httpserver.ollama.objects import PullLine
from moeserve.httpserver.ollama.pulls import Pulls
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import JSON_LINES, documented
from moeserve.httpserver.transport.request_state import state_of
from moeserve.httpserver.transport.sse import JsonLines, answer

router = APIRouter(tags=["Ollama"], route_class=DocumentedRoute)


@router.post(
    "/api/pull",
    openapi_extra=documented(PullBody, {"model": "org/repo:Q4_K_M"}, stream=PullLine, media_type=JSON_LINES),
    responses={200: {"model": PullLine, "description": "Unless stream is false: one such object a line."}},
)
async def pull(request: Request) -> Response:
    """Downloads a model of the Hugging Face Hub into its cache. A server with several models then serves it."""
    body = await read_body(request, PullBody)
    lines = _lines(_allowed(request), served_name(body.named))
    if body.stream:
        return JsonLines(lines, error_body=lambda error: {"error": error.message})
    return await answer(request, _last(lines))


@router.delete(
    "/api/delete",
    openapi_extra=documented(DeleteBody, {"model": "org/repo:Q4_K_M"}),
    responses={200: {"model": PullLine}},
)
async def delete(request: Request) -> Response:
    """Removes a downloaded model, but none that the server was started with. Running answers end first."""
    body = await read_body(request, DeleteBody)
    return await answer(request, _deleted(_allowed(request), served_name(body.named)))


def _allowed(request: Request) -> Pulls:
    pulls: Pulls = request.app.state.pulls
    pulls.require_allowed()
    state_of(request.scope).admit()
    return pulls


async def _lines(pulls: Pulls, name: str) -> AsyncGenerator[Mapping[str, Any], None]:
    """Yields what Ollama's clients show. All files count as one layer."""
    digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    yield {"status": "pulling manifest"}
    async with aclosing(pulls.pull(name)) as progress:
        async for completed, total in progress:
            yield {"status": f"pulling {name}", "digest": digest, "total": total, "completed": completed}
    yield {"status": "verifying sha256 digest"}
    yield {"status": "success"}


async def _last(lines: AsyncGenerator[Mapping[str, Any], None]) -> Mapping[str, Any]:
    async with aclosing(lines):
        return [line async for line in lines][-1]


async def _deleted(pulls: Pulls, name: str) -> Mapping[str, Any]:
    await pulls.delete(name)
    return {"status": "success"}

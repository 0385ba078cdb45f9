"""Error answers from middleware, before any route, in the error shape of the path's API."""

from __future__ import annotations

import orjson
from fastapi import Request
from starlette.types import Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.request_state import state_of
from moeserve.messages.refusal import Refusal


def request_id_of(request: Request) -> str:
    return state_of(request.scope).request_id


def note_refusal(scope: Scope, error: ApiError) -> None:
    """Notes why the request is refused, for the metrics. Only the first reason is kept."""
    state = state_of(scope)
    if state.refusal is None:
        state.refusal = error.refusal


def refusal_of(scope: Scope) -> Refusal | None:
    return state_of(scope).refusal


async def refuse(scope: Scope, send: Send, apis: ApiTable, error: ApiError) -> None:
    """Answers with `error`, and notes the refusal for the metrics. If the body has not arrived completely, the
    connection is closed after the answer (`sliced_connection.py`)."""
    note_refusal(scope, error)
    body = orjson.dumps(apis.error_body(scope["path"], error, state_of(scope).request_id))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers(),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})

"""An error's answer from a middleware: before any route, in the shape of the path's API."""

from __future__ import annotations

from typing import Final

import orjson
from fastapi import Request
from starlette.types import Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError

REQUEST_ID_KEY: Final = "request_id"  # in the scope's state


def request_id_of(request: Request) -> str:
    request_id: str = request.scope["state"][REQUEST_ID_KEY]
    return request_id


async def refuse(scope: Scope, send: Send, apis: ApiTable, error: ApiError) -> None:
    """Answers with `error`. Where the body has not come yet, the connection ends with that (`sliced_connection.py`)."""
    body = orjson.dumps(apis.error_body(scope["path"], error, scope["state"][REQUEST_ID_KEY]))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers(),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})

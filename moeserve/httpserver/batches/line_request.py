"""Answers one line of a batch through the route that a client would call, with the same checks and the same answer."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request
from starlette.types import Message

from moeserve.httpserver.transport.api_table import Endpoint
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.request_state import state_of
from moeserve.httpserver.transport.sse import json_of

log = logging.getLogger(__name__)

_STREAMED: Final = "stream: answers of a batch are not streamed; leave it out"


@dataclass(frozen=True, slots=True)
class Answered:
    status: int
    body: bytes  # JSON
    request_id: str
    retry_after: int | None = None  # seconds; set if the server could not take the request now
    seconds_elsewhere: float = 0.0  # that another process's event loop has spent on it
    is_lost: bool = False  # its server has ended meanwhile; `body` is the error if that happens too often


def new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def failed(
    error_body: Callable[[str, ApiError, str], Mapping[str, Any]], path: str, error: ApiError, request_id: str
) -> Answered:
    """Returns the answer to a line that ended in an error. error_body: `ApiTable.error_body`."""
    body = orjson.dumps(error_body(path, error, request_id))
    wait = (error.retry_after or 1) if error.status == 503 else None
    return Answered(error.status, body, request_id, wait)


@dataclass
class LineAnswerer:
    """Calls the application's routes for the lines of batches."""

    app: FastAPI
    endpoints: Mapping[str, Endpoint]  # by path
    error_body: Callable[[str, ApiError, str], Mapping[str, Any]]  # `ApiTable.error_body`

    async def answer(self, path: str, body: Mapping[str, Any], tenant: str, owner: str) -> Answered:
        """Answers one request of a batch and returns the answer's status and body. tenant, owner: the tenant and the
        owner of the batch's API key (see `RequestState`)."""
        request_id = new_request_id()
        request = self._request(path, orjson.dumps(body), request_id, tenant, owner)
        try:
            if body.get("stream"):
                raise ApiError(400, _STREAMED, param="stream", code="unsupported")
            answer = await json_of(await self.endpoints[path](request))
        except ApiError as error:
            return self._failed(path, error, request_id)
        except MemoryError:
            return self._failed(
                path, ApiError(503, "no memory for this request", code="out_of_memory"), request_id
            )
        except Exception:
            log.exception("a line of a batch failed, with the request id %s", request_id)
            message = f"internal error; the server's log has the cause, under the request id {request_id}"
            return self._failed(path, ApiError(500, message, code="internal_error"), request_id)
        return Answered(200, answer, request_id)

    def _failed(self, path: str, error: ApiError, request_id: str) -> Answered:
        return failed(self.error_body, path, error, request_id)

    def _request(self, path: str, body: bytes, request_id: str, tenant: str, owner: str) -> Request:
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
            "app": self.app,
            "route": SimpleNamespace(path=path),
            "state": {},
        }
        state = state_of(scope)
        state.request_id, state.tenant, state.key_owner = request_id, tenant, owner
        state.is_background = True
        sent = False

        async def receive() -> Message:
            nonlocal sent
            assert not sent, "only a stream waits for a disconnect"
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return Request(scope, receive)

"""A line of a batch that the front passes to one model's server (`moeserve/front/batch_lines.py`).

With several models the front keeps the batches. A model's server answers the lines that name its model, exactly as it
answers lines of its own batches: in the background, for the batch's API key. The route exists only in a server that a
front has started, and accepts a line only with the front's secret.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from typing import Final

import msgspec
import orjson
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from moeserve.config import FRONT_SECRET_ENV
from moeserve.httpserver.batches.input_lines import MAX_LINE_BYTES
from moeserve.httpserver.batches.line_request import Answered, LineAnswerer
from moeserve.httpserver.transport.api_table import Api
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.metered import Metered
from moeserve.httpserver.transport.request_state import state_of
from moeserve.httpserver.transport.sse import ClientGone, JsonResponse, unless_gone

PATH: Final = "/internal/batch-line"
SECRET_HEADER: Final = "x-moeserve-front-secret"

router = APIRouter()


class LineAnswer(msgspec.Struct):
    """The answer to a line, sent from the model's server to the front: an `Answered` as JSON."""

    status: int
    request_id: str
    retry_after: int | None
    seconds: float  # that this process's event loop has spent on the line
    body: msgspec.Raw

    def as_answered(self) -> Answered:
        return Answered(self.status, bytes(self.body), self.request_id, self.retry_after, self.seconds)


@router.post(PATH, include_in_schema=False)
async def answer_line(request: Request) -> Response:
    """Answers a line. Query parameters: the path of the line's request, and the tenant and the owner of the batch's API
    key."""
    given = request.headers.get(SECRET_HEADER, "")
    if not hmac.compare_digest(given.encode(), os.environ[FRONT_SECRET_ENV].encode()):
        raise ApiError(401, "only the front may send lines of batches", code="invalid_api_key")
    state_of(request.scope).admit()
    return _LineResponse(request, orjson.loads(await request.body()))


class _LineResponse(Response):
    """The answer to a line, which ends if the front disconnects."""

    def __init__(self, request: Request, body: dict[str, object]) -> None:
        super().__init__()
        self._query = request.query_params
        self._body = body
        apis = request.app.apis
        self._answerer = LineAnswerer(request.app, apis.batched, apis.error_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = 0.0

        def charge(more: float) -> None:
            nonlocal seconds
            seconds += more

        async def answer() -> Answered:
            names = (self._query["tenant"], self._query["owner"])
            answered: Answered = await Metered(
                self._answerer.answer(self._query["path"], self._body, *names).__await__(), charge
            )
            return answered

        with contextlib.suppress(ClientGone):
            found = await unless_gone(receive, answer())
            said = {
                "status": found.status,
                "request_id": found.request_id,
                "retry_after": found.retry_after,
                "seconds": seconds,
                "body": orjson.Fragment(found.body),
            }
            await JsonResponse(said)(scope, receive, send)


API: Final = Api(
    name="batch_lines",
    routers=(router,),
    open_paths=frozenset({PATH}),
    quiet_paths=frozenset({PATH}),
    # The front has read the line already, so the bounds on clients' bodies do not apply.
    uploads={PATH: MAX_LINE_BYTES},
)

"""A toy API, as much code as a folder of httpserver has, and a server with it:
`python -m tests.support.servers.toy_api`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import uvloop
from fastapi import APIRouter, Request, Response

from moeserve.config import ServerConfig
from moeserve.httpserver.app import APIS
from moeserve.httpserver.generation.prepare import prepare
from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.server import serve
from moeserve.httpserver.transport.api_table import Api
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.request_model import RequestModel
from moeserve.httpserver.transport.sse import answer
from moeserve.processes.lifecycle import Process, run_process

router = APIRouter(tags=["Toy"])


class ToyRequest(RequestModel):
    ask: str
    words: int = 4

    def asked(self, caller: Caller) -> Asked:
        return Asked(caller, [self.ask], prompt_param="ask", max_tokens=self.words)


class AskedBefore:
    """The API's own state."""

    def __init__(self, config: ServerConfig) -> None:
        self.texts: list[str] = [config.served_model_name or ""]

    def close(self) -> None:
        self.texts.clear()


@router.post("/toy/ask", openapi_extra=documented(ToyRequest, {"ask": "Hello"}))
async def ask(request: Request) -> Response:
    """Asks the toy."""
    caller = caller_of(request)
    body = await read_body(request, ToyRequest)
    return await answer(request, _answer(service_of(request), body, caller))


async def _answer(service: Service, body: ToyRequest, caller: Caller) -> dict[str, Any]:
    prepared = await prepare(service, body.asked(caller))
    (items,) = await prepared.complete()
    state = service.api_states["toy"]
    assert isinstance(state, AskedBefore)
    before = list(state.texts)
    state.texts.append(body.ask)
    return {"said": "".join(item.text for item in items), "before": before}


@router.get("/toy/ping")
async def ping() -> dict[str, bool]:
    return {"pong": True}


def toy_error(error: ApiError, request_id: str) -> Mapping[str, Any]:
    return {"oops": error.message, "status": error.status, "id": request_id}


API = Api(
    name="toy",
    routers=(router,),
    bodies=(ToyRequest,),
    error_body=toy_error,
    prefix="/toy",
    request_id_header="toy-id",
    open_paths=frozenset({"/toy/ping"}),
    open_state=AskedBefore,
)


def main(process: Process) -> None:
    uvloop.run(serve(process, (*APIS, API)))


if __name__ == "__main__":
    run_process("httpserver", main)

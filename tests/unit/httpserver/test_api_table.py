"""The APIs in their table and in the document of the server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.httpserver.app import APIS, Application
from moeserve.httpserver.transport.api_table import Api, ApiTable
from tests.support.servers import toy_api


def test_it_is_documented_beside_the_others() -> None:
    before, after = Application().openapi(), Application((*APIS, toy_api.API)).openapi()
    assert set(after["paths"]) - set(before["paths"]) == {"/toy/ask", "/toy/ping"}
    assert set(after["components"]["schemas"]) - set(before["components"]["schemas"]) == {"ToyRequest"}
    assert {path: after["paths"][path] for path in before["paths"]} == before["paths"]


def test_names_and_prefixes_are_unique() -> None:
    names = [api.name for api in APIS]
    prefixes = [api.prefix for api in APIS if api.prefix is not None]
    assert len(set(names)) == len(names)
    assert len(set(prefixes)) == len(prefixes)


def test_the_longest_prefix_names_the_api() -> None:
    outer = Api("outer", (), prefix="/a", request_id_header="outer-id")
    inner = Api("inner", (), prefix="/a/b", request_id_header="inner-id")
    for table in (ApiTable((outer, inner)), ApiTable((inner, outer))):
        found = [table.request_id_header(path) for path in ("/", "/a/c", "/a/b/c")]
        assert found == [None, "outer-id", "inner-id"]


def test_a_state_that_cannot_be_opened_leaves_none_open() -> None:
    class State:
        closed = False

        def close(self) -> None:
            self.closed = True

    state = State()

    def fails(config: ServerConfig) -> State:
        raise ConfigError("no")

    table = ApiTable((Api("a", (), open_state=lambda config: state), Api("b", (), open_state=fails)))
    with pytest.raises(ConfigError, match="no"):
        table.open_states(ServerConfig())
    assert state.closed


def test_the_document_has_keys_errors_and_streams() -> None:
    open_server, keyed = Application().openapi(), Application(wants_key=True).openapi()
    schemes = keyed["components"]["securitySchemes"]
    assert (schemes["bearer"]["scheme"], schemes["x-api-key"]["name"]) == ("bearer", "x-api-key")
    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]
    assert keyed["paths"]["/v1/models"]["get"]["security"] == keys
    assert open_server["paths"]["/v1/models"]["get"]["security"] == [{}, *keys]
    assert keyed["paths"]["/health"]["get"]["security"] == []

    def named(path: str, status: str, media_type: str) -> str:
        content = keyed["paths"][path]["post"]["responses"][status]["content"]
        name: str = content[media_type]["schema"]["$ref"].rpartition("/")[2]
        assert name in keyed["components"]["schemas"]
        return name

    assert named("/v1/chat/completions", "4XX", "application/json") == "ErrorBody"
    assert named("/v1/messages", "5XX", "application/json") == "MessagesError"
    assert named("/api/chat", "4XX", "application/json") == "OllamaError"
    assert named("/v1/chat/completions", "200", "text/event-stream") == "ChatCompletionChunk"
    assert named("/v1/responses", "200", "text/event-stream") == "ResponseEvent"
    assert named("/api/chat", "200", "application/x-ndjson") == "ChatLine"


def test_the_document_is_made_once_and_by_another_thread() -> None:
    made_by = []

    class Watched(Application):
        def openapi(self) -> dict[str, Any]:
            made_by.append(threading.current_thread())
            return super().openapi()

    async def ask_twice_at_once() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=Watched())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.get("/openapi.json") for _ in range(2)))

    answers = asyncio.run(ask_twice_at_once())
    assert [answer.json() for answer in answers] == [Application().openapi()] * 2
    assert len(made_by) == 1
    assert made_by[0] is not threading.current_thread()


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = Application().openapi()
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])

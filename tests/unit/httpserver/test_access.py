"""What is told of every HTTP request, also of one that a bug ends: its line, its count, its id."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from moeserve.config import ServerConfig
from moeserve.httpserver.app import build_app
from moeserve.httpserver.batches.queries import API_NAME as BATCHES
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.observability.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("a-model")


@pytest.fixture
def app(metrics: Metrics) -> FastAPI:
    """The application with a route that has a bug; of the service, only what is used before a route."""
    service: Any = SimpleNamespace(
        config=ServerConfig(),
        metrics=metrics,
        engine=SimpleNamespace(tracer=None, state=EngineState()),
        api_states={BATCHES: None},
        model_name="a-model",
    )
    app = build_app(service)

    @app.get("/boom")
    async def boom() -> None:
        raise ValueError("a bug")

    return app


def ask(app: FastAPI, method: str, path: str) -> httpx.Response:
    async def one() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers={"x-request-id": "id-1"})

    return asyncio.run(one())


def counted(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    """By method, handler and status."""
    return {
        (sample.labels["method"], sample.labels["handler"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
        if sample.name == "moeserve:http_requests_total"
    }


def test_a_bug_is_a_500_with_its_id_everywhere(
    app: FastAPI, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    response = ask(app, "GET", "/boom")
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "id-1"
    assert "id-1" in response.json()["error"]["message"]
    assert "a bug" not in response.text
    assert counted(metrics) == {("GET", "/boom", "500"): 1.0}
    (line,) = (one for one in caplog.records if one.name == "moeserve.httpserver.access")
    fields: dict[str, Any] = vars(line)["fields"]
    assert (fields["status"], fields["error"]) == (500, "ValueError: a bug")


def test_labels_are_not_a_client_s_to_invent(app: FastAPI, metrics: Metrics) -> None:
    for path in ("/a", "/b", "/c%0a"):
        ask(app, "GET", path)
    ask(app, "BREW", "/boom")
    ask(app, "PATCH", "/v1/completions")
    assert {handler for _, handler, _ in counted(metrics)} <= {"other", "/boom", "/v1/completions"}
    assert {method for method, _, _ in counted(metrics)} == {"GET", "PATCH", "_OTHER"}


def test_the_first_request_is_not_kept_by_what_the_framework_puts_off(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It analyses functions with pydantic, a third of a second for all, which other answers would wait for."""
    analysed = []
    analyse = TypeAdapter.__init__

    def counting(self: TypeAdapter[Any], *args: Any, **kwargs: Any) -> None:
        analysed.append(args)
        analyse(self, *args, **kwargs)

    monkeypatch.setattr(TypeAdapter, "__init__", counting)
    assert ask(app, "GET", "/nowhere").status_code == 404  # it is looked for in all routers
    assert analysed == []

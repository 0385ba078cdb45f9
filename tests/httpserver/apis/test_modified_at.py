"""A model's time in Ollama's lists and in its page: that of its file."""

from __future__ import annotations

from moeserve.httpserver.ollama.models import modified_at
from tests.support.servers.http_harness import MODEL, NAME, HttpServer


def test_one_model(server: HttpServer) -> None:
    expected = modified_at(str(MODEL), 0.0)
    (tag,) = server.get("/api/tags").json()["models"]
    assert tag["modified_at"] == expected
    assert server.post("/api/show", {"model": NAME}).json()["modified_at"] == expected

"""A fixture for modules whose tests share one httpserver."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers.http_harness import Answer, HttpServer


def as_new(answer: Answer | None) -> Any:
    """Returns a fixture that every test of a module uses: its `server` has no requests yet and answers with `answer`;
    None: as the module's last test has left it."""

    @pytest.fixture(autouse=True)
    def _as_new(server: HttpServer) -> None:
        if answer is not None:
            server.answer = answer
        server.requests.clear()
        server.aborted.clear()

    return _as_new

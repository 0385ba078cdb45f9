"""The official openai client of a real httpserver with an echoing engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.http_harness import HttpServer, echo
from tests.support.official_clients import openai_client

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(autouse=True)
def _as_new(server: HttpServer) -> None:
    server.answer = echo
    server.requests.clear()


@pytest.fixture(scope="module")
def client(server: HttpServer) -> OpenAI:
    return openai_client(server.url)

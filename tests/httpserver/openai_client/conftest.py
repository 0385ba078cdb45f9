"""The official openai client of a real httpserver with an echoing engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clients.official_clients import openai_client
from tests.support.servers.fresh_server import as_new
from tests.support.servers.http_harness import HttpServer, echo

if TYPE_CHECKING:
    from openai import OpenAI


_as_new = as_new(echo)


@pytest.fixture(scope="module")
def client(server: HttpServer) -> OpenAI:
    return openai_client(server.url)

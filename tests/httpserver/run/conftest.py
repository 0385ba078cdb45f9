"""For the tests of `moeserve run`: a chat with httpserver, with the test in place of its engine."""

from __future__ import annotations

import pytest

from tests.support.clients.run_chats import Chat
from tests.support.servers.http_harness import HttpServer


@pytest.fixture
def server(shared_server: HttpServer) -> HttpServer:
    """As new for each test, not for each module."""
    shared_server.begin_anew()
    return shared_server


@pytest.fixture
def chat(server: HttpServer) -> Chat:
    return Chat(server.url)

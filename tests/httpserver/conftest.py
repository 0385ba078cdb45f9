"""For the tests of the HTTP API: httpserver as it is, with the test in place of the engine behind it."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.pictures.visual_server import VisualServer, seeing_server
from tests.support.servers.http_harness import HttpServer, http_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture(scope="module")
def server(shared_server: HttpServer) -> HttpServer:
    """One process for all modules that want nothing special of it, each with a fresh engine."""
    shared_server.begin_anew()
    return shared_server


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[httpx.Client]:
    """A plain HTTP client of the module's server."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[HttpServer]:
    """For a test that sends load reports: after the first, httpserver expects one each second."""
    with http_server() as running:
        yield running


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[HttpServer, VisualServer]]:
    """For a module about pictures: httpserver, with the test in place of the engine and of the visual server."""
    with seeing_server() as both:
        yield both


@pytest.fixture
def seeing(world: tuple[HttpServer, VisualServer]) -> HttpServer:
    world[0].begin_anew()
    return world[0]


@pytest.fixture
def visual(world: tuple[HttpServer, VisualServer]) -> VisualServer:
    world[1].pictures, world[1].answer = [], world[1].encoded
    return world[1]

"""httpserver as it is, with the test in place of the engine behind it."""

from collections.abc import Iterator

import pytest

from tests.support.http_harness import HttpServer, http_server


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running

"""80 connections without a key that do their worst (`tests.support.clients.hostile_clients`): what others
notice of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.hostile_clients import AT_HEALTH_PORT, ATTACKS, Address, keyed_server, measure
from tests.support.servers.server import Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keyed() -> Iterator[tuple[Server, Address, Address]]:
    with keyed_server() as found:
        yield found


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.waits_for_processes("speeds of two processes beside one another are compared")
def test_health_and_a_stream_go_on(keyed: tuple[Server, Address, Address], attack: str) -> None:
    server, api, _ = keyed
    noticed = measure(server, attack, api)
    assert noticed.passes, noticed


@pytest.mark.parametrize("attack", AT_HEALTH_PORT)
@pytest.mark.waits_for_processes("speeds of two processes beside one another are compared")
def test_the_health_port_too(keyed: tuple[Server, Address, Address], attack: str) -> None:
    server, _, health = keyed
    noticed = measure(server, attack, health)
    assert noticed.passes, noticed

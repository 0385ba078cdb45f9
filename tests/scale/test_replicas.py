"""Three servers behind a gateway: prefixes are found, a rolling restart costs nothing, and a killed server costs its
running answers and no more.
docs/results/survival.md has the figures; `-s` prints them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.completions import running
from tests.scale.gateways import GATEWAYS, gateway, healthy, wait_for
from tests.scale.prefix_hits import POOL, cached_share
from tests.scale.streams import lost, stream, streaming
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import free_port, within

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GATEWAYS is None, reason="run make test-replicas"),
]
NAMES = ("smg", "vllm-router")
DRAIN = ("--drain-delay", "3", "--served-model-name", "m", "--threads", "1")


def replica(model: Path, port: int, tokens: int) -> Server:
    return Server(model, "--port", str(port), "--max-total-tokens", str(tokens), *DRAIN)


@pytest.fixture(scope="module")
def replicas(tiny_model: Path) -> Iterator[list[Server]]:
    servers: list[Server] = []
    try:
        servers += [replica(tiny_model, free_port(), POOL) for _ in range(3)]
        yield servers
    finally:
        for server in servers:
            server.kill()


def urls(servers: list[Server]) -> list[str]:
    return [server.base_url for server in servers]


def test_prefixes_are_found_as_in_one_server_with_the_same_pool(
    replicas: list[Server], tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(tiny_model, "--max-total-tokens", str(3 * POOL), *DRAIN[2:]) as one:
        alone = cached_share(one.base_url, "one")
    shares = {}
    for name in NAMES:
        for policy in ("cache_aware", "round_robin"):
            with gateway(name, policy, urls(replicas), tmp_path) as front:
                shares[name, policy] = cached_share(front.url, f"{name} {policy}")
    print(f"one server {alone:.2f}, {shares}")
    assert shares["smg", "cache_aware"] >= 0.9 * alone
    assert shares["vllm-router", "cache_aware"] >= 0.75 * alone  # it spreads the prefixes less evenly
    for name in NAMES:
        assert shares[name, "round_robin"] < 0.7 * alone


@pytest.mark.parametrize("name", NAMES)
def test_a_rolling_restart_loses_nothing(
    name: str, replicas: list[Server], tiny_model: Path, tmp_path: Path
) -> None:
    with gateway(name, "cache_aware", urls(replicas), tmp_path) as front:
        start = time.monotonic()
        with streaming(front.url, clients=8, tokens=40) as ends:
            for index, server in enumerate(list(replicas)):
                port = int(server.base_url.rsplit(":", 1)[1])
                assert server.stop() == 0
                replicas[index] = replica(tiny_model, port, POOL)
                wait_for(front, 3)
        seconds = time.monotonic() - start
        assert healthy(front) == 3
    print(f"{name}: {len(ends)} streams in {seconds:.0f} s of restarts, { ({one.end for one in ends}) }")
    assert {one.end for one in ends} == {"length"}
    assert len(ends) > 30


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_replica_costs_its_running_answers_and_no_more(
    name: str, replicas: list[Server], tiny_model: Path, tmp_path: Path
) -> None:
    with gateway(name, "round_robin", urls(replicas), tmp_path) as front, ThreadPoolExecutor(48) as pool:
        asked = [pool.submit(stream, front.url, number, 150) for number in range(48)]
        assert within(60, lambda: sum(running(server) for server in replicas) == 48)
        victim = replicas[2]
        there = running(victim)
        victim.kill()
        later = [pool.submit(stream, front.url, 100 + number, 4) for number in range(24)]
        answers = [one.result(180) for one in asked]
        after = [one.result(180).end for one in later]
        expected = list(pool.map(lambda number: stream(urls(replicas)[0], number, 150), range(48)))
    ended = lost(answers, expected)
    print(f"{name}: {ended} of 48 end with an error, {int(there)} ran there; after: {set(after)}")
    assert 0 < ended <= there
    assert set(after) == {"length"}
    replicas[2] = replica(tiny_model, int(victim.base_url.rsplit(":", 1)[1]), POOL)

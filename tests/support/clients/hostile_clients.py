"""Clients without a key that do what they can to hold up a server: what /health and a stream with a key notice.

    python -m tests.support.clients.hostile_clients
    python -m tests.support.clients.hostile_clients --attack pipelined-gets --connections 10 --checkout ../before

A row is printed for each attack: the most CPU time that the HTTP server's event loop took within one request of
/health, the longest that such a request took by the clock, the speed of a stream beside the attack as a share of its
speed alone, its longest pause, and the event loop's share of a core alone and beside the attack. A row passes if
/health said 200 each time, within HEALTH_CPU_S of CPU, and the stream kept SPEED. Exits with 1 unless all pass. The
hostile clients run in another process, of the lowest priority, so that the server is measured and not they.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.servers.server import REPOSITORY, Server, running_server
from tests.support.servers.waiting import free_port

KEY: Final = "alice"
TOKENS: Final = 2000  # of one answer of the stream
HEALTH_CPU_S: Final = 0.1  # what passes: of the event loop, within one request of /health
SPEED: Final = 0.8  # what passes: of the stream, as a share of its speed alone
PIECE: Final = 100_000  # bytes that are sent at once, about

Address = tuple[str, int]
Attack = Callable[[Address], None]  # on one connection, until the server ends it


def repeated(request: bytes) -> bytes:
    return request * (PIECE // len(request) + 1)


def flood(first: bytes, then: bytes) -> Attack:
    """Sends `first`, then `then` without end, and reads nothing."""

    def attack(address: Address) -> None:
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(first)
            while True:
                connection.sendall(then)

    return attack


def pipelined(method: str, path: str, body: bytes = b"") -> Attack:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n".encode() + body
    return flood(b"", repeated(request))


def one_after_another(path: str) -> Attack:
    """Requests on a connection that is kept alive, each after the answer to the one before."""

    def attack(address: Address) -> None:
        connection = http.client.HTTPConnection(*address, timeout=30)
        while True:
            connection.request("GET", path)
            connection.getresponse().read()

    return attack


def one_each(request: bytes) -> Attack:
    """Sends a request and reads until the server closes the connection."""

    def attack(address: Address) -> None:
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(request)
            while connection.recv(1 << 16):
                pass

    return attack


def trickle(first: bytes, then: bytes, pause: float) -> Attack:
    """Sends `then` byte by byte, each in a packet of its own."""

    def attack(address: Address) -> None:
        with socket.create_connection(address, timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(first)
            while True:
                for byte in then:
                    connection.send(bytes([byte]))
                    time.sleep(pause)

    return attack


def reading_pipeline(path: str) -> Attack:
    """A pipeline whose answers are read."""

    def attack(address: Address) -> None:
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 20
        with socket.create_connection(address, timeout=30) as connection:
            while True:
                connection.sendall(request)
                connection.recv(1 << 20)

    return attack


POST: Final = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED: Final = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MANY_FIELDS: Final = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"a:\r\n" * 15_000 + b"\r\n"
LONG_PATH: Final = b"GET /" + b"%41" * 20_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
ATTACKS: Final[dict[str, Attack]] = {
    "pipelined-gets": pipelined("GET", "/v1/models"),
    "pipelined-unknown-paths": pipelined("GET", "/nothing"),
    "pipelined-posts": pipelined("POST", "/v1/chat/completions", b"{}"),
    "pipelined-health": pipelined("GET", "/health"),
    "pipelined-health-read": reading_pipeline("/health"),
    "pipelined-metrics-read": reading_pipeline("/metrics"),
    "pages-read": reading_pipeline("/docs"),
    "documents-read": reading_pipeline("/openapi.json"),
    "kept-alive-gets": one_after_another("/v1/models"),
    "kept-alive-health": one_after_another("/health"),
    "connections": one_each(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    "connections-without-a-request": one_each(b"\r\n"),
    "refused-body": flood(POST + b"Content-Length: 1000000000000\r\n\r\n", bytes(PIECE)),
    "refused-chunks": flood(CHUNKED, b"10000\r\n" + b" " * 0x10000 + b"\r\n"),
    "tiny-chunks": flood(CHUNKED, repeated(b"1\r\n \r\n")),
    "chunk-extensions": flood(CHUNKED, repeated(b"1;a=b;c=d\r\n \r\n")),
    "trailers": flood(CHUNKED + b"0\r\n", repeated(b"a:\r\n")),
    "blank-lines": flood(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", repeated(b"\r\n")),
    "header-fields": one_each(MANY_FIELDS),
    "long-paths": one_each(LONG_PATH),
    "trickled-head": trickle(b"GET / HTTP/1.1\r\nHost: x\r\n", b"a: b\r\n", 0.001),
    "trickled-chunks": trickle(CHUNKED, b"1\r\n \r\n", 0.001),
}
AT_HEALTH_PORT: Final = ("pipelined-health", "pipelined-health-read", "kept-alive-health", "refused-body")


def attack_for(seconds: float, attack: Attack, address: Address, connections: int) -> None:
    """On each of `connections` again and again: the program of the hostile process."""
    end = time.monotonic() + seconds

    def run() -> None:
        while time.monotonic() < end:
            with suppress(OSError, http.client.HTTPException):
                attack(address)

    for _ in range(connections):
        threading.Thread(target=run, daemon=True).start()
    time.sleep(seconds)


@dataclass
class Watch:
    """What /health and a stream notice, in seconds."""

    address: Address
    health: Address  # where /health is asked for
    pid: int  # of the HTTP server
    health_cpu: list[float] = field(default_factory=list)
    health_wall: list[float] = field(default_factory=list)
    statuses: set[int | str] = field(default_factory=set)
    tokens: list[float] = field(default_factory=list)  # when each came, by the monotonic clock
    _stop: threading.Event = field(default_factory=threading.Event)

    def cpu(self) -> float:
        """Seconds of the event loop's thread."""
        schedule = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text()
        return int(schedule.split()[0]) / 1e9

    @contextmanager
    def watching(self) -> Iterator[None]:
        threads = [threading.Thread(target=run) for run in (self._ask_health, self._stream)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _ask_health(self) -> None:
        while not self._stop.is_set():
            begun, cpu = time.monotonic(), self.cpu()
            connection = http.client.HTTPConnection(*self.health, timeout=90)
            try:
                connection.request("GET", "/health")
                self.statuses.add(connection.getresponse().status)
            except OSError as error:
                self.statuses.add(type(error).__name__)
            finally:
                connection.close()
            self.health_cpu.append(self.cpu() - cpu)
            self.health_wall.append(time.monotonic() - begun)
            self._stop.wait(0.1)

    def _stream(self) -> None:
        body = {"prompt": "Once", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        while not self._stop.is_set():
            connection = http.client.HTTPConnection(*self.address, timeout=90)
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: {"):
                    self.tokens.append(time.monotonic())
                if self._stop.is_set():
                    break
            connection.close()

    def speed(self, begin: float, end: float) -> float:
        """Tokens a second."""
        return sum(begin <= token < end for token in self.tokens) / (end - begin)

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)), default=0.0)


@dataclass(frozen=True)
class Noticed:
    health_cpu: float  # of the event loop within one /health, at most; seconds
    health_wall: float
    statuses: set[int | str]
    speed: float  # as a share of that without the attack
    longest_gap: float
    cpu: float  # of the event loop, as a share of the time
    calm_cpu: float  # the same before the attack

    @property
    def passes(self) -> bool:
        return self.statuses == {200} and self.health_cpu < HEALTH_CPU_S and self.speed > SPEED

    def __str__(self) -> str:
        statuses = " ".join(map(str, sorted(self.statuses, key=str)))
        return (
            f"{self.health_cpu * 1e3:9.0f} {self.health_wall:8.2f}  {statuses:8} {self.speed:6.2f} "
            f"{self.longest_gap:7.2f} {self.calm_cpu:6.2f} {self.cpu:6.2f}  {'pass' if self.passes else 'FAIL'}"
        )


HEADS: Final = (
    f"{'':30} {'/health':>9} {'/health':>8}  {'':8} {'stream':>6} {'pause':>7} {'loop':>6} {'loop':>6}",
    f"{'attack':30} {'ms of CPU':>9} {'s':>8}  {'status':8} {'kept':>6} {'s':>7} {'calm':>6} {'then':>6}",
)


def hostile_process(
    attack: str, address: Address, seconds: float, connections: int
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tests.support.clients.hostile_clients",
        "--as-client",
        f"{address[0]}:{address[1]}",
    ]
    command += ["--attack", attack, "--seconds", str(seconds), "--connections", str(connections)]
    return subprocess.Popen(command, cwd=REPOSITORY, preexec_fn=lambda: os.nice(19))


def measure(
    server: Server,
    attack: str,
    target: Address,
    connections: int = 80,
    seconds: float = 8.0,
    calm: float = 4.0,
) -> Noticed:
    """One attack on `target`, the API's or the health port's address, at which /health is asked for too."""
    host, _, port = server.base_url.removeprefix("http://").partition(":")
    watch = Watch((host, int(port)), target, server.named("httpserver").pid)
    with watch.watching():
        time.sleep(1.0)
        calm_from, calm_cpu = time.monotonic(), watch.cpu()
        time.sleep(calm)
        calm_to, calm_cpu = time.monotonic(), watch.cpu() - calm_cpu
        quiet = len(watch.health_cpu)
        hostile = hostile_process(attack, target, seconds + 1.0, connections)
        try:
            time.sleep(1.0)  # until it has its connections
            began, cpu = time.monotonic(), watch.cpu()
            time.sleep(seconds - 0.5)
            ended, cpu = time.monotonic(), watch.cpu() - cpu
        finally:
            hostile.wait()
    return Noticed(
        max(watch.health_cpu[quiet:]),
        max(watch.health_wall[quiet:]),
        watch.statuses,
        watch.speed(began, ended) / watch.speed(calm_from, calm_to),
        watch.longest_gap,
        cpu / (ended - began),
        calm_cpu / (calm_to - calm_from),
    )


@contextmanager
def keyed_server(checkout: Path = REPOSITORY) -> Iterator[tuple[Server, Address, Address]]:
    """With the addresses of its API and its health port."""
    health = ("127.0.0.1", free_port())
    flags = ("--api-key", KEY, "--api-key", "bob", "--health-port", str(health[1]))
    with running_server(None, *flags, checkout=checkout) as server:
        host, _, port = server.base_url.removeprefix("http://").partition(":")
        yield server, (host, int(port)), health


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attack", choices=ATTACKS, action="append", help="default: all")
    parser.add_argument("--connections", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--checkout", type=Path, default=REPOSITORY, help="whose server is attacked")
    parser.add_argument("--as-client", metavar="HOST:PORT", help="be the hostile clients of this server")
    args = parser.parse_args()
    chosen = args.attack or [*ATTACKS]
    if args.as_client is not None:
        host, _, port = args.as_client.partition(":")
        attack_for(args.seconds, ATTACKS[chosen[0]], (host, int(port)), args.connections)
        os._exit(0)  # threads may wait in a call
    results: list[bool] = []
    print(*HEADS, sep="\n", flush=True)
    with keyed_server(args.checkout) as (server, api, health):
        for name in chosen:
            targets = {"": api} | ({" (health port)": health} if name in AT_HEALTH_PORT else {})
            for where, target in targets.items():
                noticed = measure(server, name, target, args.connections, args.seconds)
                print(f"{name + where:30} {noticed}", flush=True)
                results.append(noticed.passes)
    print(f"{sum(results)} of {len(results)} pass")
    if not all(results):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""KV events of a real server: a gateway that applies them knows whose prompts are cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.e2e.completions import completion
from tests.support.clients.kv_subscriber import Block, Subscriber
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

BLOCK = 8


class Gateway:
    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.subscribe("kv@")
        self.live.connect(f"ipc://{folder}/live")
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(f"ipc://{folder}/replay")
        self.subscriber = Subscriber()
        self._last_replayed = b""
        self.replay.send_multipart([b"", bytes(8)])
        while (message := self._replayed())[1]:
            self.subscriber.apply(message[1])
            self._last_replayed = message[0]

    @property
    def blocks(self) -> dict[int, Block]:
        return self.subscriber.blocks

    def _replayed(self) -> tuple[bytes, bytes]:
        assert self.replay.poll(5000)
        _, number, payload = self.replay.recv_multipart()
        return number, payload

    def has(self, tokens: list[int], *keys: str) -> bool:
        """Whether it knows that all whole blocks of `tokens` are cached, in the namespace of `keys`."""
        while self.live.poll(0):
            _, number, payload = self.live.recv_multipart()
            # A batch that is published between the two sockets' connecting comes both ways. Numbers are big-endian.
            if number > self._last_replayed:
                self.subscriber.apply(payload)
        known = self.subscriber.prefixes()
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return all((keys, tuple(tokens[:end])) in known for end in ends)


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    flags = ("--kv-events-endpoint", f"ipc://{tmp_path}/live")
    more = ("--kv-events-replay-endpoint", f"ipc://{tmp_path}/replay", "--kv-events-topic", "kv@here")
    with running_server(tiny_model, *flags, *more, "--kv-events-block-size", str(BLOCK)) as server:
        yield server


def test_a_gateway_knows_what_is_cached(server: Server, tmp_path: Path) -> None:
    prompt = list(range(300, 300 + 5 * BLOCK + 3))
    completion(server, prompt=prompt)
    late = Gateway(tmp_path)  # what came before it is replayed
    assert late.has(prompt)
    other = [*prompt[:20], *range(700, 730)]
    completion(server, prompt=other)
    assert within(30, lambda: late.has(other))
    salted = list(range(800, 830))
    completion(server, prompt=salted, cache_salt="mine")
    assert within(30, lambda: late.has(salted, "mine"))
    assert not late.has(salted)

    server.named("worker").kill()
    assert within(30, lambda: server.metrics()["moeserve:engine_losses_total"] == 1)
    assert within(30, lambda: not late.has(prompt))
    assert late.blocks == {}
    completion(server, prompt=prompt)
    assert within(30, lambda: late.has(prompt))
    again = Gateway(tmp_path)
    assert within(30, lambda: late.has(prompt) and again.has(prompt) and again.blocks == late.blocks)

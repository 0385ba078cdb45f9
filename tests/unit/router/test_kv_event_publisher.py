"""KV events on their way: frames, numbers, replays, slow subscribers, strangers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.kv_events import BlockRemoved, KvEvent
from moeserve.router import kv_event_publisher
from moeserve.router.kv_event_publisher import REPLAY_END, KvEventPublisher
from tests.support.clients.kv_subscriber import decode


class Gateway:
    """A subscriber and a client for replays."""

    def __init__(self, folder: Path, topic: str = "", *, batches: int = 10_000) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.RCVHWM, batches)
        self.live.subscribe(topic)
        self.live.connect(f"ipc://{folder}/live")
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(f"ipc://{folder}/replay")

    def receive(self, timeout: float = 30.0) -> list[bytes]:
        assert self.live.poll(int(timeout * 1000)), "no batch has come"
        return self.live.recv_multipart()

    def missed(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from the number `first` on."""
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            assert self.replay.poll(30_000), "the replay does not end"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == REPLAY_END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[KvEventPublisher]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = KvEventPublisher(context, f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay", "kv@a")
    yield made
    made.close()
    context.destroy(0)


@pytest.fixture
def gateway(publisher: KvEventPublisher, tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path, "kv@")
    while not made.live.poll(20):  # until the subscription has arrived
        publisher.publish(removal(0))
    yield made
    made.context.destroy(0)


def removal(hash: int) -> list[KvEvent]:
    return [BlockRemoved([hash])]


def removed(payload: bytes) -> int:
    """The block of a `removal`; -1 of the batch with which a server begins."""
    ((_, event),) = decode(payload)
    hash: int = event.get("block_hashes", [-1])[0]
    return hash


def test_a_batch_is_a_topic_a_number_and_events(publisher: KvEventPublisher, gateway: Gateway) -> None:
    publisher.publish(removal(7))
    publisher.publish([])
    publisher.publish(removal(8))
    batches: list[list[bytes]] = []
    while not batches or removed(batches[-1][2]) != 8:
        batches.append(gateway.receive())
    assert {topic for topic, _, _ in batches} == {b"kv@a"}
    numbers = [int.from_bytes(number, "big") for _, number, _ in batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # no batch for no events
    assert removed(batches[-2][2]) == 7


def test_a_late_subscriber_replays_from_the_beginning(publisher: KvEventPublisher, gateway: Gateway) -> None:
    for hash in range(1, 100):
        publisher.publish(removal(hash))
    while removed(gateway.receive()[2]) != 99:
        pass
    batches = gateway.missed(0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    assert [name for name, _ in decode(batches[0][1])] == ["AllBlocksCleared"]  # a server begins empty
    assert [removed(payload) for _, payload in batches[-99:]] == list(range(1, 100))
    assert gateway.missed(len(batches) - 2) == batches[-2:]
    assert gateway.missed(len(batches)) == []


def test_a_replay_reaches_back_a_bounded_number_of_batches_and_bytes(
    publisher: KvEventPublisher, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "REPLAY_BATCHES", 10)
    for hash in range(1, 31):
        publisher.publish(removal(hash))
    while removed(gateway.receive()[2]) != 30:
        pass
    assert [removed(payload) for _, payload in gateway.missed(0)] == list(range(21, 31))
    monkeypatch.setattr(kv_event_publisher, "REPLAY_BYTES", 2000)
    publisher.publish([BlockRemoved(list(range(1 << 60, (1 << 60) + 100)))])
    publisher.publish([BlockRemoved(list(range(1 << 60, (1 << 60) + 200)))])
    while removed(gateway.receive()[2]) < 1 << 60:
        pass
    gateway.receive()
    assert len(gateway.missed(0)) == 1


def test_a_subscriber_that_reads_nothing_delays_nobody(
    publisher: KvEventPublisher, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond its queue is dropped; it sees the gap and replays."""
    slow = Gateway(tmp_path, batches=1)
    while not slow.live.poll(20):
        publisher.publish(removal(0))
    large: list[KvEvent] = [BlockRemoved([1 << 60] * 300)]
    for number in range(12_000):  # it never ended if one waited for who reads nothing
        publisher.publish(large)
        if number % 64 == 0:
            while gateway.live.poll(0):
                gateway.receive()
    publisher.publish(removal(5))
    while removed(gateway.receive()[2]) != 5:
        pass
    numbers: list[int] = []
    found = -1
    while found != 6:  # behind what had been queued for it, with whatever its context still held
        if not slow.live.poll(100):
            publisher.publish(removal(6))
            continue
        _, encoded, payload = slow.receive()
        numbers.append(int.from_bytes(encoded, "big"))
        found = removed(payload)
    gaps = [before for before, after in itertools.pairwise(numbers) if after > before + 1]
    assert gaps  # it sees that it has missed some
    kept = slow.missed(gaps[-1] + 1)
    assert [number for number, _ in kept] == list(range(gaps[-1] + 1, gaps[-1] + 1 + len(kept)))
    assert removed(kept[-1][1]) == 6
    slow.context.destroy(0)


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"more"]])
def test_what_is_no_request_is_ignored(
    publisher: KvEventPublisher, gateway: Gateway, frames: list[bytes]
) -> None:
    gateway.replay.send_multipart(frames)
    assert gateway.missed(0)


def test_a_client_that_asks_and_never_reads_stops_nothing(
    publisher: KvEventPublisher, gateway: Gateway, tmp_path: Path
) -> None:
    for hash in range(1, 2001):
        publisher.publish(removal(hash))
    while removed(gateway.receive()[2]) != 2000:
        pass
    greedy = gateway.context.socket(zmq.DEALER)
    greedy.setsockopt(zmq.RCVHWM, 1)
    greedy.connect(f"ipc://{tmp_path}/replay")
    for _ in range(50):
        greedy.send_multipart([b"", bytes(8)])
    assert len(gateway.missed(0)) > 2000
    publisher.publish(removal(9))
    assert removed(gateway.receive()[2]) == 9


def test_flags_that_cannot_work_are_refused(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def wanted(**flags: str) -> KvEventPublisher | None:
        return KvEventPublisher.wanted(context, ServerConfig(**flags))  # type: ignore[arg-type]

    assert wanted() is None
    with pytest.raises(ConfigError, match="--kv-events-endpoint"):
        wanted(kv_events_replay_endpoint=f"ipc://{tmp_path}/replay")
    with pytest.raises(ConfigError, match="prefix cache"):
        wanted(kv_events_endpoint=f"ipc://{tmp_path}/live", prefix_cache="off")
    for endpoint in ("5557", "tcp://127.0.0.1", f"ipc://{tmp_path}/missing/live", "tcp://192.0.2.1:5557"):
        with pytest.raises(ConfigError, match=endpoint):
            wanted(kv_events_endpoint=endpoint)
    context.destroy(0)

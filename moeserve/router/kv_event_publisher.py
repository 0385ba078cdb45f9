"""Publishes KV events to gateways: new batches on a PUB socket, missed batches on request on a ROUTER socket.

A thread owns both sockets, so that neither a slow subscriber nor a replay delays the router's next plan. All buffers
are bounded:

- The PUB socket queues SUBSCRIBER_BATCHES per subscriber and drops further ones. The subscriber notices the missing
  sequence number and asks for a replay.
- The last REPLAY_BATCHES batches, of at most REPLAY_BYTES, are kept for replays.
- QUEUED_BATCHES may wait for the thread. A batch that does not fit is lost with its number, so that subscribers see a
  gap that no replay fills.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import Final

import zmq

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.kv_events import AllBlocksCleared, KvEvent, encode_batch

log = logging.getLogger(__name__)

SUBSCRIBER_BATCHES: Final = 10_000
REPLAY_BATCHES: Final = 10_000
REPLAY_BYTES: Final = 64 << 20
QUEUED_BATCHES: Final = 10_000
SEQUENCE_BYTES: Final = 8
REPLAY_END: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # the number in a replay's last message
MAX_REQUEST_BYTES: Final = 1024  # of a replay request
LINGER_MS: Final = 200
_QUEUE: Final = "inproc://kv-events"
_STOP: Final = b""

_Socket = zmq.Socket[bytes]


class KvEventPublisher:
    """`publish` and `close` may only be called from one thread, the router's."""

    def __init__(
        self,
        context: zmq.Context[_Socket],
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        as_maps: bool = True,
    ) -> None:
        """Binds both endpoints and announces an empty cache. `as_maps`: see `encode_batch`. Raises ConfigError."""
        self._as_maps = as_maps
        sender = _Sender(context, endpoint, replay_endpoint, topic)
        self._queue = context.socket(zmq.PUSH)
        self._queue.setsockopt(zmq.SNDHWM, QUEUED_BATCHES)
        self._queue.bind(_QUEUE)
        self._next = 0
        self._is_full = False
        self._thread = threading.Thread(target=sender.run, name="kv-events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    @classmethod
    def wanted(cls, context: zmq.Context[_Socket], config: ServerConfig) -> KvEventPublisher | None:
        """Returns the publisher for the configuration; None if no endpoint is set. Raises ConfigError if the flags
        contradict each other."""
        if config.kv_events_endpoint is None:
            if config.kv_events_replay_endpoint is not None:
                raise ConfigError("--kv-events-replay-endpoint needs --kv-events-endpoint")
            return None
        if config.prefix_cache == "off":
            raise ConfigError("--kv-events-endpoint needs a prefix cache; leave out --prefix-cache off")
        return cls(
            context,
            config.kv_events_endpoint,
            config.kv_events_replay_endpoint,
            config.kv_events_topic,
            as_maps=config.kv_events_format == "maps",
        )

    def publish(self, events: list[KvEvent]) -> None:
        """Queues one batch, unless `events` is empty. Never blocks."""
        if not events:
            return
        number = self._next.to_bytes(SEQUENCE_BYTES, "big")
        self._next += 1
        payload = encode_batch(time.time(), events, as_maps=self._as_maps)
        try:
            self._queue.send_multipart([number, payload], zmq.NOBLOCK)
        except zmq.Again:
            if not self._is_full:
                log.warning("KV events are lost: the thread that sends them is behind")
            self._is_full = True
        else:
            self._is_full = False

    def close(self) -> None:
        """Ends the thread after it has sent the queued batches."""
        self._queue.send(_STOP)
        self._thread.join()
        self._queue.close()


class _Sender:
    """The sending thread."""

    def __init__(
        self, context: zmq.Context[_Socket], endpoint: str, replay_endpoint: str | None, topic: str
    ) -> None:
        self._topic = topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque()  # (sequence number, payload), in order
        self._kept_bytes = 0
        self._queue = context.socket(zmq.PULL)
        self._queue.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
        self._queue.connect(_QUEUE)
        self._publication = _bound(context.socket(zmq.PUB), endpoint, SUBSCRIBER_BATCHES)
        self._replay: _Socket | None = None
        if replay_endpoint is not None:
            # A whole replay fits into one client's queue, so sending it never blocks.
            self._replay = _bound(context.socket(zmq.ROUTER), replay_endpoint, REPLAY_BATCHES + 1)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._queue in ready:
                frames = self._queue.recv_multipart()
                if frames == [_STOP]:
                    break
                self._send(*frames)
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        for socket in (self._queue, self._publication, self._replay):
            if socket is not None:
                socket.close()

    def _send(self, number: bytes, payload: bytes) -> None:
        # A PUB socket drops messages instead of blocking.
        self._publication.send_multipart([self._topic, number, payload])
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > REPLAY_BATCHES or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: _Socket) -> None:
        """Answers a replay request: an empty frame, as a REQ socket sends it, then the first wanted number.
        Malformed requests are ignored. The answer ends with the number -1, even if the client reads no more of it."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            return
        client, empty, first = frames
        with contextlib.suppress(zmq.Again):  # a client that keeps asking without reading
            for number, payload in self._kept:
                if number >= first:
                    replay.send_multipart([client, empty, number, payload], zmq.NOBLOCK)
            replay.send_multipart([client, empty, REPLAY_END, b""], zmq.NOBLOCK)


def _bound(socket: _Socket, endpoint: str, high_water_mark: int) -> _Socket:
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(
            f"KV events: cannot listen at {endpoint}: {error.strerror}; endpoints are tcp://127.0.0.1:5557 or "
            "ipc:///path"
        ) from error
    return socket

"""A TCP proxy that delays what goes through it, and can stand still or cut its connections: a network between a server
and a remote worker, for tests and benchmarks.

    python -m tests.support.faults.delay_proxy HOST:PORT MILLISECONDS    prints the port that it listens at

Each line that it reads is another delay.

Threads and time.sleep, because event loops count in milliseconds and a tenth of one is asked for.
"""

from __future__ import annotations

import queue
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

CHUNK = 1 << 18


class DelayProxy:
    """Listens at 127.0.0.1, `port`. `delay` in seconds, each way; bandwidth is as it comes."""

    def __init__(self, target: tuple[str, int], delay: float) -> None:
        self.delay = delay
        self.bytes_forwarded = 0
        self.reads = {"to the worker": 0, "from the worker": 0}  # a small message is one read
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flows = threading.Event()  # cleared: what has arrived lies here
        self._flows.set()
        self._refuses = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """From now on nothing comes out, and nothing is closed: a cable that was pulled."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Resets all connections, and every later one, until `mend`."""
        self._refuses = True
        with self._lock:
            for sock in self._sockets:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()

    def mend(self) -> None:
        self._refuses = False

    def close(self) -> None:
        self._listener.close()
        self.cut()
        self.thaw()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses:
                client.close()
                continue
            try:
                worker = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            for sock in (client, worker):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, worker}
            self._join(client, worker, "to the worker")
            self._join(worker, client, "from the worker")

    def _join(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            data = b"?"
            while data:
                try:
                    data = source.recv(CHUNK)
                except OSError:
                    data = b""
                self.reads[way] += bool(data)
                under_way.put((time.perf_counter() + self.delay, data))

        def write() -> None:
            with suppress(OSError):
                while True:
                    due, data = under_way.get()
                    self._flows.wait()
                    if (left := due - time.perf_counter()) > 0:
                        time.sleep(left)
                    if not data:
                        break
                    self.bytes_forwarded += len(data)
                    sink.sendall(data)
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        for work in (read, write):
            threading.Thread(target=work, daemon=True).start()


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    proxy = DelayProxy((host, int(port)), float(sys.argv[2]) / 1e3)
    print(proxy.port, flush=True)
    for line in sys.stdin:  # until whoever has started us ends
        proxy.delay = float(line) / 1e3


if __name__ == "__main__":
    main()

"""The connection between router and worker: rpyc over a Unix stream socket. Each call has at most one bytes argument
and one bytes result.

rpyc also offers proxies of remote objects, pickling and remote attribute access. CONFIG disables all of it on both
sides, whatever rpyc's defaults are or become; only `exposed_` methods can be called.
"""

from __future__ import annotations

import select
import socket
from typing import Any, Final

from rpyc.core.channel import Channel
from rpyc.core.protocol import Connection
from rpyc.core.service import Service
from rpyc.core.stream import SocketStream

CONFIG: Final[dict[str, Any]] = {
    "allow_pickle": False,
    "allow_all_attrs": False,
    "allow_public_attrs": False,
    "allow_safe_attrs": False,
    "allow_setattr": False,
    "allow_delattr": False,
    "allow_exposed_attrs": True,  # the service's methods, and nothing else
    "exposed_prefix": "exposed_",
    "import_custom_exceptions": False,
    "instantiate_custom_exceptions": False,
    "instantiate_oldstyle_exceptions": False,
    "include_local_traceback": False,
    "bind_threads": False,
}


# Time for the other end to read some bytes; the worker reads none while it computes.
WRITE_TIMEOUT_S: Final = 120


class DuplexStream(SocketStream):  # type: ignore[misc]  # rpyc has no types
    """A socket stream that reads while it waits to write.

    A plan with a long prompt is larger than the socket's buffer, and a result with prompt logprobs may be too. If both
    ends were in a blocking send, neither would ever read: a deadlock. So this end reads incoming bytes while it writes.
    It is enough that one end of a connection does; here it is the router's.
    """

    __slots__ = ("_ahead",)

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._ahead = bytearray()

    @property
    def has_read_ahead(self) -> bool:
        """True if the buffer has unread bytes; the file descriptor may then not be readable."""
        return bool(self._ahead)

    def poll(self, timeout: Any) -> bool:
        return bool(self._ahead) or bool(super().poll(timeout))

    def read(self, count: int) -> bytes:
        if not self._ahead:
            return bytes(super().read(count))
        data = bytes(self._ahead[:count])
        del self._ahead[:count]
        return data + bytes(super().read(count - len(data))) if len(data) < count else data

    def write(self, data: bytes) -> None:
        """Raises EOFError when the connection is broken. The connection stays open then, because the other end's last
        answer may still be unread."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait_writable()
            except OSError as error:
                raise EOFError(error) from error

    def _wait_writable(self) -> None:
        poller = select.poll()
        poller.register(self.sock, select.POLLIN | select.POLLOUT)
        ready = poller.poll(WRITE_TIMEOUT_S * 1000)
        if not ready:
            raise EOFError(f"the other end read nothing for {WRITE_TIMEOUT_S} s")
        ((_, events),) = ready
        if events & select.POLLIN:
            arrived = self.sock.recv(self.MAX_IO_CHUNK)
            if not arrived:
                raise EOFError("connection closed by peer")
            self._ahead += arrived


def connection(service: Service, stream: SocketStream) -> Connection:
    """Returns an rpyc connection with `service` at this end. Not compressed, because the bytes never leave the
    machine."""
    channel = Channel(stream, compress=False)
    made: Connection = service._connect(channel, CONFIG)
    return made

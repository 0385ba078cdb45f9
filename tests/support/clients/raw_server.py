"""Servers that answer with given bytes, and the bytes of a stream."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def raw_server(
    *answers: Sequence[bytes] | Callable[[socket.socket], None],
) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers one connection after the other with these bytes, whatever is asked, and closes it. Yields
    its address, and the requests that it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []

    def serve() -> None:
        for index, answer in enumerate(answers):
            connection, _ = listener.accept()
            if index == len(answers) - 1:
                listener.close()  # a further connection is refused rather than left to wait
            with connection:
                requests.append(_request(connection))
                if callable(answer):
                    answer(connection)
                else:
                    for part in answer:
                        connection.sendall(part)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.close()


def _request(connection: socket.socket) -> bytes:
    """Head and body."""
    with connection.makefile("rb") as file:
        lines = list(iter(file.readline, b"\r\n"))
        (length,) = [
            int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")
        ] or [0]
        return b"".join(lines) + b"\r\n" + file.read(length)


def stream_of(*events: str) -> bytes:
    """A whole answer of server-sent events."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        + "".join(f"data: {event}\n\n" for event in events).encode()
    )


def piece(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})

"""An HTTP server whose answers break off, as a dying server's do, or are another program's, as a proxy's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# By the path that is asked for: HTTP's status, the body, and how many bytes the head promises.
BREAKS = {
    "/cut": (200, b'{"data": [', 1000),
    "/cut-error": (503, b'{"error": {', 1000),
    "/short": (200, b'{"data": [', 10),
    "/page": (200, b"<html>Sign in</html>", 20),
}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body, promised = BREAKS[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(body)  # HTTP/1.0: the connection ends here

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))  # what is not read would reset the connection
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests' output is for what went wrong."""


@contextmanager
def broken_answers() -> Iterator[str]:
    """The server's URL; it answers the paths of `BREAKS`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()

"""The server that `bench serve --against-engine` starts: how long it is waited for, and how it is asked."""

from __future__ import annotations

import sys

import pytest

from moeserve.cli.bench import against_engine
from moeserve.errors import ConfigError

ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
LOADS = "import time; time.sleep(60)"
ENDS = "raise SystemExit(3)"


def program(text: str, monkeypatch: pytest.MonkeyPatch, ready_s: float = 30.0) -> None:
    monkeypatch.setattr(against_engine, "MOESERVE", (sys.executable, "-c", text))
    monkeypatch.setattr(against_engine, "READY_S", ready_s)


def test_it_is_not_asked_by_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait never ended where http_proxy is set."""
    program(ANSWERS, monkeypatch)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    with against_engine.server_of([]) as url:
        assert url.startswith("http://127.0.0.1:")


def test_a_server_that_is_never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    program(LOADS, monkeypatch, ready_s=0.3)
    with pytest.raises(ConfigError, match=r"was not ready at http://127\.0\.0\.1:\d+ within 0\.005 minutes"):
        against_engine.server_of([]).__enter__()


def test_a_server_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    program(ENDS, monkeypatch)
    with pytest.raises(ConfigError, match="the server ended with exit code 3"):
        against_engine.server_of([]).__enter__()

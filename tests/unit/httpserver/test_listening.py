"""Where a server listens: at both families' addresses, at a Unix socket, and with TLS."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.schema import ProcessFailed, ProcessReady
from moeserve.processes.listeners import listen, listen_at, open_listeners, url_of
from tests.support.http_harness import HttpServer


def test_two_colons_are_both_families() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=30):
                pass
        assert url_of(listener) == f"http://[::]:{port}"
    with listen("::1", 0) as listener, pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=30)


def test_the_health_port_is_another_than_the_apis() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--health-port: {port} is --port too: choose another"):
        open_listeners(ServerConfig(port=port, health_port=port))


@pytest.mark.parametrize("host", ["http://127.0.0.1", "127.0.0.1:8000", "[::1]"])
def test_an_address_with_more_than_the_host(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host takes an address alone, such as .*, and --port the port"):
        listen(host, 0)


def test_sockets_that_systemd_has_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3);"
            "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'};"
            "from moeserve.config import ServerConfig;"
            "from moeserve.processes.listeners import open_listeners, with_addresses;"
            "config = ServerConfig(uds='/x'); found = open_listeners(config); made = with_addresses(config, found.api);"
            "print(len(found.api), made.host, made.port, made.uds, found.api[0].get_inheritable())"
        )
        result = subprocess.run(
            [sys.executable, "-c", program, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert result.stdout == f"1 127.0.0.1 {listener.getsockname()[1]} None False\n", result.stderr


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    server = HttpServer(uds=str(path))
    try:
        started = server.start_message()
        assert isinstance(started, ProcessReady)
        assert started.url == f"unix:{path}"
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost"
        ) as client:
            assert client.get("/version").status_code == 200
        with pytest.raises(ConfigError, match="another server listens"):
            listen_at(path)
    finally:
        server.close()
    listen_at(path).close()  # nobody listens there any more
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--uds: .*/file is a file, not a socket"):
        listen_at(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"--uds: .* is a folder: name a file in it"):
        listen_at(tmp_path)
    with pytest.raises(ConfigError, match="--uds"):
        listen_at(tmp_path / "no" / "folder")


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    server = HttpServer(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    try:
        assert isinstance(server.start_message(), ProcessReady)
        assert server.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(server.url + "/version", verify=trusted).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/version")
    finally:
        server.close()


def test_a_certificate_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    server = HttpServer(ssl_certfile=str(tmp_path / "cert.pem"))
    try:
        failed = server.start_message()
        assert isinstance(failed, ProcessFailed)
        assert failed.message.startswith("--ssl-certfile")
    finally:
        server.close()

"""A server that listens at a Unix socket, and with TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from moeserve.errors import ConfigError
from moeserve.messages.schema import ProcessFailed, ProcessReady
from moeserve.processes.listeners import listen_at
from tests.support.servers.http_harness import HttpServer


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
    listen_at(path).close()  # no process listens there any more
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

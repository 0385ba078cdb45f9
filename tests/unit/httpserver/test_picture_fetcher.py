"""Pictures that are addresses: which hosts are asked, and what a host can do to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import Thread

import pytest

from moeserve.httpserver.generation.engine import picture_fetcher
from moeserve.httpserver.generation.engine.picture_fetcher import PictureFetcher, is_public
from moeserve.httpserver.transport.errors import ApiError

REDIRECTS = {
    "/moved": "/picture",
    "/elsewhere": "http://example.com/picture",
    "/file": "file:///etc/passwd",
    "/round": "/round",
}


class Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path in REDIRECTS:
            self.send_response(302)
            self.send_header("location", REDIRECTS[self.path])
        elif self.path == "/picture":
            self.send_response(200)
        elif self.path == "/large":
            self.send_response(200)
            self.send_header("content-encoding", "gzip")
        else:
            self.send_response(404)
        self.end_headers()
        if self.path in ("/picture", "/large"):
            self.wfile.write(b"a picture" * (1 if self.path == "/picture" else 20))

    def log_message(self, *of: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


def fetched(url: str, fetcher: PictureFetcher) -> bytes:
    return asyncio.run(fetcher.fetch(url, "messages"))


def of_tests() -> PictureFetcher:
    """It takes this machine's addresses, where the tests' host is."""
    return PictureFetcher(("LocalHost.",), lambda address: True)


@pytest.mark.parametrize("path", ["/picture", "/moved"])
def test_a_host_that_is_named(host: str, path: str) -> None:
    assert fetched(f"HTTP://{host}{path}", of_tests()) == b"a picture"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://{host}/absent", "its host answers 404"),
        ("http://{host}/elsewhere", "'example.com', which --allowed-media-domains does not name"),
        ("http://{host}/file", "use http:// or https://"),
        ("http://{host}/round", "more than 3 redirects"),
        ("http://{host}/large", "has more than 100 bytes"),
        ("http://a:b@{host}/picture", "without a user"),
        ("ftp://{host}/picture", "use http:// or https://"),
        ("https://{host}/picture", "its host does not answer"),
        ("http://127.0.0.1/picture", "'127.0.0.1', which"),
        ("http://below.localhost/picture", "'below.localhost', which"),
        ("http://localhost@example.com/", "without a user"),
        ("http://[::1/picture", "could not be fetched"),
        ("http://localhost:1/picture", "its host does not answer"),
    ],
)
def test_what_is_refused(host: str, url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_fetcher, "MAX_PICTURE_BYTES", 100)
    with pytest.raises(ApiError) as refused:
        fetched(url.format(host=host), of_tests())
    assert refused.value.status == 400
    assert words in refused.value.message


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "2130706433", "0x7f.1"])
def test_this_machine_is_not_asked(host: str, name: str) -> None:
    """Whatever the operator names: the address counts."""
    with pytest.raises(ApiError, match=r"does not answer|not public"):
        fetched(f"http://{name}:{host.partition(':')[2]}/picture", PictureFetcher((name,)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(one, True) for one in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")],
        *[(one, False) for one in ("10.1.2.3", "192.168.0.1", "172.16.5.5", "169.254.169.254", "100.64.0.1")],
        *[(one, False) for one in ("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1")],
        *[(one, False) for one in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:7f00:1::", "ff02::1", "fec0::1")],
    ],
)  # fmt: skip
def test_public_addresses(text: str, expected: bool) -> None:
    assert is_public(ip_address(text)) is expected


def test_without_hosts_nothing_is_fetched() -> None:
    with pytest.raises(ApiError, match="not fetched from addresses"):
        fetched("https://example.com/a.png", PictureFetcher(()))

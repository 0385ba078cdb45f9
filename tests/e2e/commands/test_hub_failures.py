"""What a newcomer's download may meet: a hub with too many requests, a host that refuses, a full disk, a mirror that
cannot resume. Each message names cause and remedy, and what is in the cache is served all the same."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.hub_client import Client
from tests.support.servers.hub_server import Hub, running_hub

REPO = "acme/tiny-GGUF"
FOLDER = "acme/tiny"
LARGE = 25 << 20
MOUNT = 'mount -t tmpfs -o size=45m tmpfs "$1"; shift; exec "$@"'
TOO_MANY = (429, {"Retry-After": "1"})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repositories" / REPO
    folder.mkdir(parents=True)
    (folder / "tiny-Q8_0.gguf").write_bytes(b"GGUF" * 2000)
    (folder / "large-Q4_0.gguf").write_bytes(b"GGUF" * (LARGE // 4))
    weights = tmp_path / "repositories" / FOLDER
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(b"weights" * 200)
    with running_hub(tmp_path / "repositories") as running:
        yield running


@pytest.fixture
def client(tmp_path: Path, hub: Hub) -> Client:
    return Client(tmp_path / "home", hub)


def test_a_hub_with_too_many_requests_says_when_to_try_again(client: Client, hub: Hub) -> None:
    hub.failing = {"api": TOO_MANY}
    (error,) = client.ask(f"{REPO}:Q8_0")
    assert f"{hub.url} answered with status 429" in error
    assert "try again after 1 s, or set HF_TOKEN" in error
    assert not list(client.cache.rglob("*.gguf"))


@pytest.mark.parametrize("failure", [TOO_MANY, (503, {})], ids=["429", "503"])
def test_what_was_downloaded_is_served_while_the_hub_refuses(
    client: Client, hub: Hub, failure: tuple[int, dict[str, str]]
) -> None:
    path, _ = client.fetch(f"{REPO}:Q8_0")
    hub.failing = {"api": failure}
    served, other = client.ask(f"{REPO}:Q8_0", f"{REPO}:Q4_0")
    assert served[0] == str(path)
    assert "nothing fits 'Q4_0'" in other
    assert f"answered with status {failure[0]}" in other, "it was reached"


def test_a_file_that_the_hub_refuses_after_its_listing(client: Client, hub: Hub) -> None:
    hub.failing = {"resolve": TOO_MANY}
    (error,) = client.ask(FOLDER)
    assert f"{hub.url} answered with status 429" in error
    assert "cannot be reached" not in error


def test_a_password_of_the_hub_and_a_token_that_is_set(client: Client, hub: Hub) -> None:
    hub.failing = {"api": TOO_MANY}
    address = hub.url.replace("//", "//user:secret@")
    process = client.start(f"{REPO}:Q8_0", HF_ENDPOINT=address, HF_TOKEN="hf_token")
    out, err = process.communicate(timeout=120)
    assert "answered with status 429" in out
    assert "set HF_TOKEN" not in out
    assert "secret" not in out + err


def test_a_redirect_that_does_not_end_is_no_hub(client: Client, hub: Hub) -> None:
    hub.failing = {"api": (307, {"Location": f"/api/models/{REPO}"})}
    (error,) = client.ask(f"{REPO}:Q8_0")
    assert f"{hub.url} does not answer as a hub does; check HF_ENDPOINT" in error


def test_a_refusal_of_the_files_host_names_that_host(client: Client, hub: Hub) -> None:
    """A company's proxy may let the hub through, and not the host to which it redirects."""
    hub.failing = {"cdn": (403, {})}
    (error,) = client.ask(f"{REPO}:Q8_0")
    assert f"http://localhost:{hub.port} answered with status 403; the network's proxy" in error
    assert "HF_TOKEN" not in error


def test_a_certificate_that_is_not_trusted_is_named(client: Client, hub: Hub, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    name = ["-subj", "/CN=hub", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*request, *name, *files], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with running_hub(hub.root, context) as encrypted:
        (error,) = client.ask(f"{REPO}:Q8_0", HF_ENDPOINT=encrypted.url)
        assert f"the certificate of {encrypted.url} is not trusted" in error
        assert "in SSL_CERT_FILE" in error
        found = client.ask(f"{REPO}:Q8_0", HF_ENDPOINT=encrypted.url, SSL_CERT_FILE=str(certificate))
    assert found[0][1] == f"{REPO}:Q8_0"


def test_each_attempt_is_told_once(client: Client, hub: Hub) -> None:
    hub.break_after = 12 << 20
    process = client.start(f"{REPO}:Q4_0")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err.count("Trying to resume") == 2, err


def test_a_mirror_that_sends_the_whole_file_again(client: Client, hub: Hub) -> None:
    hub.ignores_ranges = True
    hub.stall_after = 12 << 20
    cut_off = client.start(f"{REPO}:Q4_0")
    try:
        wait_for_a_part(client.cache)
    finally:
        cut_off.kill()
        cut_off.communicate()
    hub.stall_after = None
    path, _ = client.fetch(f"{REPO}:Q4_0")
    assert path.read_bytes() == (hub.root / REPO / "large-Q4_0.gguf").read_bytes()
    assert client.partial() == []


def test_a_disk_that_fills_up_while_downloading(client: Client, hub: Hub) -> None:
    """The room was there when the download began, and another program took it."""
    alone = ["unshare", "--user", "--mount", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this system does not let its users mount a small disk")
    disk = client.cache.parent
    disk.mkdir()
    hub.stall_after = 12 << 20
    process = client.start(f"{REPO}:Q4_0", before=[*alone, "sh", "-c", MOUNT, "sh", str(disk)])
    inside = Path(f"/proc/{process.pid}/root{client.cache}")
    try:
        wait_for_a_part(inside)
        with pytest.raises(OSError, match="No space left"):
            (inside / "filler").write_bytes(bytes(45 << 20))
        hub.stall_after = None
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (
        "No space left on device; what was downloaded is kept: make room and run the same command" in out
    ), err


def wait_for_a_part(cache: Path) -> None:
    """Waits until the beginning of a file is there."""
    until = time.monotonic() + 60
    while not [file for file in cache.rglob("*.incomplete") if file.stat().st_size]:
        assert time.monotonic() < until
        time.sleep(0.05)

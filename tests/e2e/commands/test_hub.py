"""Models by name, from a local hub over real HTTP, by processes with the environment that users set."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moeserve.cli.run.line_reader import PROMPT
from tests.conftest import TINY_MODEL
from tests.support.clients.hub_client import Client
from tests.support.clients.terminal import CTRL_D, Terminal
from tests.support.nightly import nightly_after
from tests.support.servers.hub_server import COMMIT, Hub, running_hub

REPO = "acme/tiny-GGUF"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of which only the names and sizes matter, each with content of its own."""
    root = tmp_path_factory.mktemp("hub")
    files = {
        f"{REPO}/README.md": 50,
        f"{REPO}/tiny-Q8_0.gguf": 200_000,
        f"{REPO}/tiny-Q4_K_M.gguf": 300_000,
        f"{REPO}/Q6_K/tiny-Q6_K-00001-of-00002.gguf": 70_000,
        f"{REPO}/Q6_K/tiny-Q6_K-00002-of-00002.gguf": 60_000,
        "acme/torn-GGUF/torn-Q4_0-00002-of-00002.gguf": 2000,
        "acme/single-GGUF/model.IQ4_XS.gguf": 2000,
        "acme/dense/config.json": 0,
        "acme/dense/model.safetensors": 90_000,
        "acme/private-GGUF/p-Q4_K_M.gguf": 2000,
        "acme/gated-GGUF/g-Q4_K_M.gguf": 2000,
        "acme/text/README.md": 10,
        "acme/large-GGUF/large.gguf": 45 << 20,
    }
    for name, size in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        content = b"GGUF" + name.encode() * (size // len(name) + 1)
        (root / name).write_bytes(content[:size])
    (root / "acme/real-GGUF").mkdir()
    (root / "acme/real-GGUF/tiny-Q4_K_M.gguf").symlink_to(TINY_MODEL)
    (root / "acme/dense/config.json").write_text('{"model_type": "mamba"}')
    return root


@pytest.fixture
def hub(repositories: Path) -> Iterator[Hub]:
    with running_hub(repositories) as running:
        yield running


@pytest.fixture
def client(tmp_path: Path, hub: Hub) -> Client:
    return Client(tmp_path / "home", hub)


def test_a_name_becomes_a_file_in_the_cache(client: Client, hub: Hub, repositories: Path) -> None:
    path, name = client.fetch(f"{REPO}:q8_0")
    assert name == f"{REPO}:q8_0"
    assert path == client.cache / f"models--acme--tiny-GGUF/snapshots/{COMMIT}/tiny-Q8_0.gguf"
    assert path.read_bytes() == (repositories / REPO / "tiny-Q8_0.gguf").read_bytes()
    assert client.partial() == []
    before = len(hub.downloads())
    assert client.fetch(f"{REPO}:tiny-Q8_0.gguf")[0] == path
    assert len(hub.downloads()) == before, "it was in the cache"


def test_without_a_tag_it_is_q4_k_m_and_a_split_set_is_whole(client: Client, hub: Hub) -> None:
    (default, _), (split, _), (only, _) = client.ask(REPO, f"{REPO}:Q6_K", "acme/single-GGUF")
    assert Path(default).name == "tiny-Q4_K_M.gguf"
    assert Path(split).name == "tiny-Q6_K-00001-of-00002.gguf"
    assert [path.stat().st_size for path in sorted(Path(split).parent.iterdir())] == [70_000, 60_000]
    assert Path(only).name == "model.IQ4_XS.gguf"


@pytest.mark.slow
def test_a_broken_connection_and_a_killed_process_go_on_where_they_were(
    client: Client, hub: Hub, repositories: Path
) -> None:
    """The library writes pieces of 10 MiB: what is left of one is fetched again."""
    hub.stall_after = 12 << 20
    killed = client.start("acme/large-GGUF")
    deadline = time.monotonic() + 60
    while client.partial() != [10 << 20]:
        assert time.monotonic() < deadline, client.partial()
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    hub.stall_after, hub.break_after = None, 21 << 20
    path, _ = client.fetch("acme/large-GGUF")
    assert path.read_bytes() == (repositories / "acme/large-GGUF/large.gguf").read_bytes()
    spans = [span for _, span in hub.downloads()]
    assert spans == [None, f"bytes={10 << 20}-", f"bytes={30 << 20}-"]


def test_a_pinned_revision_is_served_and_one_that_is_not_there_named(client: Client, hub: Hub) -> None:
    (tag, name), (commit, _), missing = client.ask(
        f"{REPO}@v1.0:Q8_0", f"{REPO}@{COMMIT}:Q8_0", f"{REPO}@v2:Q8_0"
    )
    assert name == f"{REPO}@v1.0:Q8_0"
    assert tag == commit
    assert "has no branch, tag or commit v2" in missing
    hub.down = True
    assert client.fetch(f"{REPO}@v1.0:Q8_0")[0] == Path(tag), "the cache knows the tag"


def test_what_comes_damaged_is_refused_and_fetched_anew(client: Client, hub: Hub) -> None:
    hub.damaged = True
    (refusal,) = client.ask(f"{REPO}:Q8_0")
    assert "tiny-Q8_0.gguf was damaged on the way" in refusal
    assert client.partial() == []
    hub.damaged = False
    assert client.fetch(f"{REPO}:Q8_0")[0].exists()


@pytest.mark.slow
def test_two_at_once_download_once_and_a_terminal_sees_a_bar(client: Client, hub: Hub) -> None:
    terminal, stderr = os.openpty()
    termios.tcsetwinsize(stderr, (24, 80))
    both = [client.start("acme/large-GGUF", stderr=stderr) for _ in range(2)]
    os.close(stderr)
    shown = read_to_the_end(terminal)
    paths = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert paths[0] == paths[1] != ""
    assert hub.downloads() == [("large.gguf", None)]
    assert "downloading: 100%" in shown
    assert "47.2M/47.2M" in shown


def read_to_the_end(terminal: int) -> str:
    """What is written until nobody has the terminal open any more, which reads as an I/O error."""
    shown = b""
    with suppress(OSError):
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    return shown.decode()


def test_offline_the_cache_serves_and_what_it_lacks_is_named(client: Client, hub: Hub) -> None:
    there, lacking, unknown = f"{REPO}:Q8_0", f"{REPO}:Q5_K_M", "acme/other:Q8_0"
    (found,) = client.ask(there)
    asked = len(hub.requests)
    cached, lacks, knows_not = client.ask(there, lacking, unknown, HF_HUB_OFFLINE="1")
    assert cached == found
    assert "nothing fits 'Q5_K_M'" in lacks
    assert "tiny-Q8_0.gguf\n(only the cache is there: HF_HUB_OFFLINE is set; unset it" in lacks
    assert "HF_HUB_OFFLINE is set; unset it" in knows_not
    assert len(hub.requests) == asked
    cached, knows_not = client.ask(there, unknown, HF_ENDPOINT="http://127.0.0.1:9")
    assert cached == found
    assert "http://127.0.0.1:9 cannot be reached; check the network and HF_ENDPOINT" in knows_not
    hub.down = True
    assert client.ask(there) == [found]


def test_what_keeps_the_hub_from_being_asked_is_named(client: Client) -> None:
    """Proxies and tokens of the environment, which the library's own errors do not name."""
    absent = "acme/other:Q8_0"
    (error,) = client.ask(absent, ALL_PROXY="socks5://127.0.0.1:9", NO_PROXY="")
    assert "a SOCKS proxy is set (ALL_PROXY), which needs one more package: pip install socksio" in error
    (error,) = client.ask(absent, HTTP_PROXY="http://127.0.0.1:9", NO_PROXY="")
    assert "cannot be reached; check the network, HF_ENDPOINT and HTTP_PROXY, or name" in error
    (error,) = client.ask(absent, HF_TOKEN="hf_ü")
    assert "HF_TOKEN has characters that no token has" in error


@pytest.mark.slow
def test_private_gated_and_missing_repositories(client: Client, hub: Hub) -> None:
    hub.tokens["acme/private-GGUF"] = "hf_secret"
    hub.gated.add("acme/gated-GGUF")
    private = "acme/private-GGUF"
    assert client.fetch(private, HF_TOKEN="hf_secret")[0].name == "p-Q4_K_M.gguf"
    assert hub.leaked == [], "the other host has seen the token"
    assert "check HF_TOKEN" in client.ask(f"{private}:Q8_0", HF_TOKEN="wrong")[0]
    errors = client.ask(f"{private}:Q8_0", "acme/gated-GGUF", "acme/missing", "a--b/c..d")
    assert "set HF_TOKEN if it is private" in errors[0]
    assert f"ask for it at {hub.url}/acme/gated-GGUF" in errors[1]
    assert "neither a local path nor a repository" in errors[2]
    assert "a--b/c..d: " in errors[3]


@pytest.mark.parametrize("answer", nightly_after(1, ["<html>Welcome!</html>", '{"detail": "nothing here"}']))
def test_an_endpoint_that_is_no_hub(client: Client, hub: Hub, answer: str) -> None:
    hub.other = answer
    (error,) = client.ask(REPO)
    assert f"{hub.url} does not answer as a hub does; check HF_ENDPOINT" in error


def test_what_cannot_be_chosen_or_served_is_not_downloaded(client: Client, hub: Hub) -> None:
    errors = client.ask(f"{REPO}:Q9", "acme/torn-GGUF", "acme/dense", "acme/text")
    assert "nothing fits 'Q9'" in errors[0]
    assert "tiny-Q8_0.gguf" in errors[0]
    assert "Q6_K/tiny-Q6_K-00001-of-00002.gguf (the first of 2)" in errors[0]
    assert " 1 of the 2 " in errors[1]
    assert "torn-Q4_0" in errors[1]
    assert "model_type 'mamba' is not supported" in errors[2]
    assert "no .gguf file, nor a config.json" in errors[3]
    assert hub.downloads() == []


def test_too_little_room_is_found_out_before(client: Client, hub: Hub, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import shutil, collections\n"
        "usage = collections.namedtuple('usage', 'total used free')\n"
        "shutil.disk_usage = lambda path: usage(10**9, 10**9 - 299_999, 299_999)\n"
    )
    python_path = f"{site}{os.pathsep}{os.getcwd()}"
    refused, (path, _) = client.ask(REPO, f"{REPO}:Q8_0", PYTHONPATH=python_path)
    assert "0.00 GB are free" in refused
    assert [name for name, _ in hub.downloads()] == ["tiny-Q8_0.gguf"]
    assert Path(path).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["bench", "engine", "--batch", "1", "--prompt", "8", "--gen", "2"], ["plan"]],
    ids=lambda command: command[0],
)
def test_other_commands_take_names_too(client: Client, command: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "moeserve", *command, "--model", "acme/real-GGUF:q4_k_m", "--threads", "1"],
        env=client.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "acme/real-GGUF:q4_k_m" in run.stdout


def test_a_chat_by_name_shows_the_download_before_its_server_starts(client: Client, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moeserve", "run", "acme/real-GGUF:q4_k_m", "--port", str(port)]
    with Terminal(command, client.environment | {"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.wait_for("downloading: 100%")
        terminal.wait_for("server: ")
        terminal.wait_for("acme/real-GGUF:q4_k_m; /help lists the commands")
        terminal.wait_for(PROMPT)
        terminal.send(CTRL_D)
        assert terminal.wait() == 0

"""/api/pull and /api/delete with a local hub over real HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.support.servers.http_harness import TLS, HttpServer, http_server
from tests.support.servers.hub_server import Hub, running_hub
from tests.support.servers.waiting import within

REPO = "acme/tiny-GGUF"
SIZE = 600_000


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / REPO
    folder.mkdir(parents=True)
    for part in (1, 2):
        (folder / f"tiny-Q4_K_M-0000{part}-of-00002.gguf").write_bytes(
            b"GGUF" + bytes([part]) * (SIZE // 2 - 4)
        )
    shutil.copy(demonstration_model(), folder / "tiny-Q8_0.gguf")
    return folder.parents[1]


@pytest.fixture(scope="module")
def running(
    repositories: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Hub, HttpServer, Path]]:
    """A hub, a server that may download from it, and its cache."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as environment, running_hub(repositories) as hub:
        environment.setenv("HF_ENDPOINT", hub.url)
        environment.setenv("HF_HUB_CACHE", str(cache))
        environment.delenv("HF_TOKEN", raising=False)
        with http_server(pull="allow") as server:
            yield hub, server, cache


@pytest.fixture
def server(running: tuple[Hub, HttpServer, Path]) -> HttpServer:
    """The module's server with an empty cache."""
    hub, server, cache = running
    assert within(30, lambda: not is_downloading(server)), "the clients of an earlier test have left"
    for folder in cache.glob("models--*"):
        shutil.rmtree(folder)
    hub.requests.clear()
    hub.stall_after = None
    return server


@pytest.fixture
def hub(running: tuple[Hub, HttpServer, Path], server: HttpServer) -> Hub:
    return running[0]


@pytest.fixture
def cache(running: tuple[Hub, HttpServer, Path]) -> Path:
    return running[2]


def pull(server: HttpServer, model: str, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post("/api/pull", {"model": model} | fields)
    return [json.loads(line) for line in answer.text.splitlines()]


def delete(server: HttpServer, model: str) -> httpx.Response:
    return httpx.request("DELETE", server.url + "/api/delete", json={"model": model}, timeout=60, verify=TLS)


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*/snapshots/*/*"))


def test_a_model_comes_and_goes(server: HttpServer, hub: Hub, cache: Path) -> None:
    lines = pull(server, f"hf.co/{REPO}:Q4_K_M")
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-1] == {"status": "success"}
    progress = [line for line in lines if "total" in line]
    assert progress[-1]["completed"] == progress[-1]["total"] == SIZE
    assert len({line["digest"] for line in progress}) == 1
    assert len(files(cache)) == 2
    asked = len(hub.downloads())
    assert pull(server, f"{REPO}:Q4_K_M", stream=False) == [{"status": "success"}]
    assert len(hub.downloads()) == asked, "it is there already"
    assert delete(server, f"{REPO}:Q4_K_M").json() == {"status": "success"}
    assert files(cache) == []
    gone = delete(server, f"{REPO}:Q4_K_M")
    assert (gone.status_code, "is not downloaded" in gone.json()["error"]) == (404, True)


def is_downloading(server: HttpServer) -> bool:
    for child in psutil.Process(server.process.pid).children():
        try:
            if "hub_requests" in " ".join(child.cmdline()):
                return True
        except psutil.NoSuchProcess:  # it has ended meanwhile, or is a zombie
            continue
    return False


def part(cache: Path) -> int:
    """Bytes of a file that is not whole."""
    return sum(path.stat().st_size for path in cache.glob("*/blobs/*.incomplete"))


def test_a_client_that_leaves_ends_the_download_and_the_next_goes_on(
    server: HttpServer, hub: Hub, cache: Path
) -> None:
    hub.stall_after = 100_000
    body = {"model": f"{REPO}:Q4_K_M"}
    with httpx.stream("POST", server.url + "/api/pull", json=body, timeout=60, verify=TLS) as answer:
        lines = answer.iter_lines()
        assert next(lines) == '{"status":"pulling manifest"}'
        assert within(30, lambda: bool(hub.downloads()))
        assert is_downloading(server)
    assert within(30, lambda: not is_downloading(server))
    there = part(cache)
    hub.stall_after = None
    said = pull(server, f"{REPO}:Q4_K_M")
    assert said[-1] == {"status": "success"}
    _, span = hub.downloads()[1]
    assert span == (f"bytes={there}-" if there else "bytes=0-" if span else None)


def test_two_clients_follow_one_download(server: HttpServer, hub: Hub) -> None:
    hub.stall_after = 100_000
    body = {"model": f"{REPO}:Q4_K_M"}
    with (
        httpx.stream("POST", server.url + "/api/pull", json=body, timeout=60, verify=TLS) as first,
        httpx.stream("POST", server.url + "/api/pull", json=body, timeout=60, verify=TLS) as second,
    ):
        readers = [first.iter_lines(), second.iter_lines()]
        assert [next(lines) for lines in readers] == ['{"status":"pulling manifest"}'] * 2
        assert within(30, lambda: bool(hub.downloads()))
        assert len(hub.downloads()) == 1
        others = server.post("/api/pull", {"model": "acme/other", "stream": False})
        assert others.status_code == 502
        assert is_downloading(server)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama3.2", "is not a name on the Hub"),
        ("acme/none", "neither a local path nor a repository"),
        (f"{REPO}:Q2_K", "Q2_K"),
    ],
)
def test_what_cannot_be_had_is_said(server: HttpServer, name: str, words: str) -> None:
    assert words in pull(server, name)[-1]["error"]
    refused = server.post("/api/pull", {"model": name, "stream": False})
    assert refused.status_code in (400, 502)
    assert words in refused.json()["error"]


@pytest.mark.parametrize("name", ["", "../../etc", "a b", "--help", "x" * 600, "a/b\x00c", "a/b;rm"])
def test_hostile_names(server: HttpServer, hub: Hub, name: str) -> None:
    found = pull(server, name)[-1]
    assert "error" in found
    assert delete(server, name).status_code in (400, 404)
    assert hub.downloads() == []


def test_it_is_off_unless_it_is_allowed() -> None:
    with http_server() as server:
        for answer in (server.post("/api/pull", {"model": REPO}), delete(server, REPO)):
            assert answer.status_code == 403
            assert "--pull allow" in answer.json()["error"]


def test_a_served_model_is_not_deleted(server: HttpServer, cache: Path) -> None:
    assert pull(server, f"{REPO}:Q8_0")[-1] == {"status": "success"}
    (path,) = cache.glob("*/snapshots/*/tiny-Q8_0.gguf")
    with http_server(pull="allow", model=str(path)) as other:
        refused = delete(other, f"{REPO}:Q8_0")
        assert (refused.status_code, "is being served" in refused.json()["error"]) == (409, True)
        assert path.exists()


def test_one_model_says_how_another_is_served(server: HttpServer) -> None:
    assert pull(server, f"hf.co/{REPO}:Q8_0")[-1] == {"status": "success"}
    listed = {one["name"]: one for one in httpx.get(server.url + "/api/tags", verify=TLS).json()["models"]}
    assert listed[f"{REPO}:Q8_0"]["size"] == demonstration_model().stat().st_size
    assert f"{REPO}:Q8_0" not in {
        one["id"] for one in httpx.get(server.url + "/v1/models", verify=TLS).json()["data"]
    }, "what this server would not answer for"
    for path, name in (("/api/generate", f"hf.co/{REPO}:Q8_0"), ("/v1/completions", f"{REPO}:Q8_0")):
        refused = server.post(path, {"model": name, "prompt": "Hi", "stream": False})
        assert refused.status_code == 404
        assert f"moeserve serve MODEL {REPO}:Q8_0" in refused.text
    assert delete(server, f"{REPO}:Q8_0").status_code == 200
    assert len(httpx.get(server.url + "/api/tags", verify=TLS).json()["models"]) == len(listed) - 1
    assert (
        "moeserve serve" not in server.post("/v1/completions", {"model": f"{REPO}:Q8_0", "prompt": "Hi"}).text
    )

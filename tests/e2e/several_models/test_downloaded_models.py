"""Models that clients of Ollama's API download and delete while several are served: a local hub, real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.support.servers.hub_server import running_hub
from tests.support.servers.server import Server, running_server, stream_events
from tests.support.servers.waiting import until

NAME = "acme/tiny-GGUF:Q8_0"
PATIENCE_S = 120.0  # for a load on a busy machine


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Returns the flags of a server with one model of its own, beside a hub that has another."""
    repository = tmp_path / "hub" / NAME.partition(":")[0]
    repository.mkdir(parents=True)
    shutil.copy(demonstration_model(), repository / "tiny-Q8_0.gguf")
    shutil.copy(demonstration_model(), tmp_path / "own.gguf")
    (tmp_path / "models.yaml").write_text(json.dumps([{"model": str(tmp_path / "own.gguf")}]))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        several = ["--models-file", str(tmp_path / "models.yaml"), "--models-memory", "2"]
        common = ["--max-total-tokens", "4096", "--data-dir", str(tmp_path / "data")]
        yield [*several, *common, "--pull", "allow"]


def client_of(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, timeout=PATIENCE_S)


def pulled(client: httpx.Client, name: str) -> dict[str, Any]:
    lines = client.post("/api/pull", json={"model": name}).text.splitlines()
    last: dict[str, Any] = json.loads(lines[-1])
    return last


def chat(client: httpx.Client, name: str) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": name, "messages": messages, "stream": False, "options": {"num_predict": 4}}
    return client.post("/api/chat", json=body)


def listed(client: httpx.Client) -> set[str]:
    names = {one["id"] for one in client.get("/v1/models").json()["data"]}
    assert names == {one["name"] for one in client.get("/api/tags").json()["models"]}
    return names


def delete(client: httpx.Client, name: str) -> httpx.Response:
    return client.request("DELETE", "/api/delete", json={"model": name})


def test_a_model_is_served_from_its_download_to_its_deletion(flags: list[str], tmp_path: Path) -> None:
    with running_server(None, *flags) as server, client_of(server) as client:
        assert listed(client) == {"own"}
        assert chat(client, NAME).status_code == 404
        assert pulled(client, f"hf.co/{NAME}") == {"status": "success"}
        assert listed(client) == {"own", NAME}
        assert client.get(f"/v1/models/{NAME}").json()["state"] == "unloaded"
        until(
            lambda: client.get("/api/tags").json()["models"][1]["details"]["quantization_level"] == "Q8_0",
            PATIENCE_S,
        )
        answer = chat(client, f"hf.co/{NAME}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["done"]
        assert [one["name"] for one in client.get("/api/ps").json()["models"]] == [NAME]

        os.kill(server.named("front").pid, signal.SIGKILL)
        with client_of(server) as client:  # its connections were lost
            assert listed(client) == {"own", NAME}, "another front process knows it"
            assert chat(client, NAME).status_code == 200

            body = {"model": NAME, "stream": True, "max_tokens": 300, "ignore_eos": True, "prompt": "Once"}
            with client.stream("POST", "/v1/completions", json=body) as running:
                events = stream_events(running)
                next(events)
                with client_of(server) as other:
                    assert delete(other, NAME).json() == {"status": "success"}
                    assert listed(other) == {"own"}
                    assert list((tmp_path / "cache").glob("**/*.gguf")) == []
                    refused = chat(other, NAME)
                    assert (refused.status_code, "does not exist" in refused.text) == (404, True)
                assert list(events)[-1]["choices"][0]["finish_reason"] == "length", (
                    "it has ended as it would have"
                )
            until(lambda: client.get("/api/ps").json()["models"] == [], PATIENCE_S)
            assert delete(client, NAME).status_code == 404


@pytest.mark.slow  # half a minute
def test_the_next_server_serves_it_too_and_says_what_is_missing(flags: list[str], tmp_path: Path) -> None:
    with running_server(None, *flags) as server, client_of(server) as client:
        assert pulled(client, NAME)["status"] == "success"
    with running_server(None, *flags) as server, client_of(server) as client:
        assert listed(client) == {"own", NAME}
        assert chat(client, NAME).status_code == 200
        (file,) = (tmp_path / "cache").glob("*/snapshots/*/*.gguf")
        file.unlink()
        assert chat(client, NAME).status_code == 200, "a loaded model needs its file no longer"
        client.post("/models/unload", json={"model": NAME})
        until(lambda: client.get(f"/v1/models/{NAME}").json()["state"] == "unloaded", PATIENCE_S)
        missing = chat(client, NAME)
        assert missing.status_code == 503
        assert (
            "tiny-Q8_0.gguf is not there any more; put it back, or download it again"
            in missing.json()["error"]
        )
        assert pulled(client, NAME)["status"] == "success"
        again = chat(client, NAME)
        assert again.status_code == 200, again.text
    shutil.rmtree(tmp_path / "cache")
    with running_server(None, *flags) as server, client_of(server) as client:
        assert listed(client) == {"own"}
        assert "was downloaded once" in server.log
    assert not psutil.pid_exists(server.pid)

"""Batches whose lines name several models, with memory for two of them: real servers, real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.support.servers.server import Server, running_server, title_of
from tests.support.servers.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # several loads each
CHAT = "/v1/chat/completions"
PATIENCE_S = 600.0  # for a batch on a busy machine
KEY = {"authorization": "Bearer k-1"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in "abc":
        shutil.copy(demonstration_model(), tmp_path / f"{name}.gguf")
    (tmp_path / "models.json").write_text(
        json.dumps([{"model": str(tmp_path / f"{name}.gguf")} for name in "abc"])
    )
    flags = ["--models-memory", "1", "--max-total-tokens", "4096", "--max-num-seqs", "8", "--api-key", "k-1"]
    folder = ["--batch-dir", str(tmp_path / "batches")]
    with running_server(None, "--models-file", str(tmp_path / "models.json"), *flags, *folder) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, headers=KEY, timeout=PATIENCE_S) as client:
        yield client


def create(client: httpx.Client, models: str, tokens: int = 8, **fields: Any) -> str:
    """A batch with a line for each letter."""
    lines = [
        {
            "custom_id": f"line-{place}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"What is {place} + 1?"}],
                "max_tokens": tokens,
                **fields,
            },
        }
        for place, model in enumerate(models)
    ]
    data = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    file = client.post("/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch"})
    assert file.status_code == 200, file.text
    body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    made = client.post("/v1/batches", json=body)
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


def batch_of(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    while True:
        with suppress(httpx.TransportError):  # the front was killed
            answer = client.get(f"/v1/batches/{batch_id}")
            if answer.status_code != 503:  # else the folder is not open yet
                found: dict[str, Any] = answer.json()
                return found


def results(client: httpx.Client, batch_id: str) -> list[dict[str, Any]]:
    until(lambda: batch_of(client, batch_id)["status"] in ("completed", "failed", "expired"), PATIENCE_S)
    batch = batch_of(client, batch_id)
    assert batch["status"] == "completed", batch
    assert batch["error_file_id"] is None, client.get(f"/v1/files/{batch['error_file_id']}/content").text
    text = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    return [json.loads(line) for line in text.splitlines()]


def check(found: list[dict[str, Any]], models: str) -> None:
    """Each line has one answer, by its model."""
    assert sorted(line["custom_id"] for line in found) == sorted(
        f"line-{place}" for place in range(len(models))
    )
    for line in found:
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["model"] == models[int(line["custom_id"].partition("-")[2])]


def front_of(server: Server) -> psutil.Process:
    (front,) = [one for one in server.processes() if title_of(one) == "moeserve: front"]
    return front


def test_lines_of_three_models_and_kills(server: Server, client: httpx.Client) -> None:
    """One model's launcher is killed, then the front; requests come in between. The third model takes the place of one
    that has had no request for half a minute."""
    models = "ab" * 60 + "c" * 10
    batch = create(client, models)
    until(lambda: batch_of(client, batch)["request_counts"]["completed"] >= 20, PATIENCE_S)
    body = {"model": "a", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert client.post(CHAT, json=body).status_code == 200, "a request beside the lines"
    front_of(server).children()[0].kill()
    until(lambda: batch_of(client, batch)["request_counts"]["completed"] >= 60, PATIENCE_S)
    os.kill(front_of(server).pid, signal.SIGKILL)
    check(results(client, batch), models)
    text = client.get("/metrics").text
    assert "moeserve:front_batch_requests_left 0.0" in text
    with httpx.Client(base_url=server.base_url, headers={"authorization": "Bearer wrong"}) as stranger:
        assert stranger.post("/internal/batch-line").status_code == 401
    assert client.post("/internal/batch-line").status_code == 404, "no client can send lines"


def test_lines_give_way_to_a_request(server: Server, client: httpx.Client) -> None:
    """Lines with long answers run on both loaded models; a request for the third sends some of them back."""
    for name in "ab":
        assert client.post("/models/load", json={"model": name}).status_code == 200
    until(lambda: client.get("/metrics").text.count('state="loaded"} 1.0') == 2, PATIENCE_S)
    models = "ab" * 3
    batch = create(client, models, tokens=1000, ignore_eos=True)
    until(lambda: sum(lines_of(client, name) > 0 for name in "ab") == 2, PATIENCE_S)
    body = {"model": "c", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert client.post(CHAT, json=body).status_code == 200
    check(results(client, batch), models)


def lines_of(client: httpx.Client, model: str) -> float:
    (line,) = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith(f'moeserve:model_running_lines{{model_name="{model}"}}')
    ]
    return float(line.rpartition(" ")[2])


def test_message_batches_name_models_too(server: Server, client: httpx.Client) -> None:
    asked = {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    requests = [{"custom_id": name, "params": asked | {"model": name}} for name in ("b", "nothing")]
    made = client.post("/v1/messages/batches", json={"requests": requests})
    assert made.status_code == 200, made.text
    path = f"/v1/messages/batches/{made.json()['id']}"
    until(lambda: client.get(path).json()["processing_status"] == "ended", PATIENCE_S)
    found = {
        one["custom_id"]: one["result"]
        for one in map(json.loads, client.get(f"{path}/results").text.splitlines())
    }
    assert found["b"]["message"]["model"] == "b"
    assert found["nothing"]["type"] == "errored"
    assert "does not exist" in found["nothing"]["error"]["error"]["message"]
    assert client.get("/v1/batches/batch_nothing").status_code == 404

"""A model's server is killed with requests and lines of batches in flight: real servers, real kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.support.servers.server import Server, running_server, stream_events, title_of
from tests.support.servers.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # several loads each
CHAT = "/v1/chat/completions"
PATIENCE_S = 600.0  # for loads on a busy machine
IN_FLIGHT = 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in "ab":
        shutil.copy(demonstration_model(), tmp_path / f"{name}.gguf")
    models = [str(tmp_path / f"{name}.gguf") for name in "ab"]
    (tmp_path / "models.json").write_text(json.dumps([{"model": model} for model in models]))
    flags = ["--models-memory", "1", "--max-total-tokens", "4096", "--max-num-seqs", "8"]
    folder = ["--batch-dir", str(tmp_path / "batches")]
    with running_server(None, "--models-file", str(tmp_path / "models.json"), *flags, *folder) as running:
        yield running


def asked(model: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True}


def front_of(server: Server) -> psutil.Process:
    (front,) = [one for one in server.processes() if title_of(one) == "moeserve: front"]
    return front


def launcher_of(server: Server, place: int) -> psutil.Process:
    for child in front_of(server).children():
        if any(f"/model-{place}/" in str(socket.laddr) for socket in child.net_connections(kind="unix")):
            return child
    raise AssertionError(f"model {place} has no process")


def metric(server: Server, name: str, model: str) -> float:
    with suppress(httpx.TransportError):  # the front was killed
        for line in httpx.get(f"{server.base_url}/metrics", timeout=PATIENCE_S).text.splitlines():
            if line.startswith(f"moeserve:{name}{{") and f'model_name="{model}"' in line:
                return float(line.rpartition(" ")[2])
    return -1.0


def test_requests_in_flight_get_the_next_server(server: Server) -> None:
    """Some run, others wait for a place; the stream that has begun ends with an error, and b is not touched."""

    def ask(place: int) -> httpx.Response:
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
            return client.post(CHAT, json=asked("a", 100) | {"stream": place % 4 == 3})

    with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
        for model in "ba":
            assert client.post(CHAT, json=asked(model, 2)).status_code == 200
        loads = metric(server, "model_loads_total", "b")
        with (
            ThreadPoolExecutor(IN_FLIGHT) as pool,
            client.stream(
                "POST",
                "/v1/completions",
                json={"model": "a", "prompt": "Once", "max_tokens": 1500, "stream": True},
            ) as begun,
        ):
            events = stream_events(begun)
            next(events)
            asking = [pool.submit(ask, place) for place in range(IN_FLIGHT)]
            until(lambda: metric(server, "model_running_requests", "a") == IN_FLIGHT + 1, PATIENCE_S)
            launcher_of(server, 0).kill()
            assert list(events)[-1]["error"]["code"] == "model_lost"
            answers = [one.result() for one in asking]
    cut = [one for one in answers if '"code":"model_lost"' in one.text]
    whole = [one for one in answers if one not in cut]
    assert all(one.status_code == 200 for one in answers), [one.text for one in answers]
    assert all(place % 4 == 3 for place, one in enumerate(answers) if one in cut), (
        "only streams that had begun"
    )
    assert len(whole) >= IN_FLIGHT - IN_FLIGHT // 4
    assert metric(server, "model_requests_sent_again_total", "a") >= 24
    assert metric(server, "model_loads_total", "b") == loads
    assert "Traceback" not in server.log


def test_a_line_that_ends_its_server_fails_at_the_third(server: Server) -> None:
    """The front is killed in between, and counts on."""
    line = {"method": "POST", "url": CHAT}
    lines = [{"custom_id": "poison", **line, "body": asked("a", 1500)}]
    lines += [{"custom_id": f"good-{place}", **line, "body": asked("a", 4)} for place in range(6)]
    data = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
        file = client.post("/v1/files", files={"file": ("x.jsonl", data)}, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        path = f"/v1/batches/{client.post('/v1/batches', json=body).json()['id']}"
        until(lambda: client.get(path).json()["request_counts"]["completed"] == 6, PATIENCE_S)
        for kill in range(3):
            until(lambda: metric(server, "model_running_lines", "a") == 1, PATIENCE_S)
            launcher_of(server, 0).kill()
            until(lambda: metric(server, "model_running_lines", "a") == 0, PATIENCE_S)
            if kill == 1:
                time.sleep(1.0)  # the count is on the disk
                os.kill(front_of(server).pid, signal.SIGKILL)
        batch: dict[str, Any] = {"status": ""}

        def ended() -> bool:
            nonlocal batch
            with suppress(httpx.TransportError, json.JSONDecodeError):
                batch = client.get(path).json()
            return batch.get("status") == "completed"

        until(ended, PATIENCE_S)
        assert batch["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
        (failed,) = client.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
    found = json.loads(failed)
    assert found["custom_id"] == "poison"
    assert found["response"]["status_code"] == 500
    assert "lost 3 times" in found["response"]["body"]["error"]["message"]

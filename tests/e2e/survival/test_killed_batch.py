"""A batch over which each process of the server is killed in turn: each line is answered once."""

from __future__ import annotations

import collections
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.servers.server import Server

NUM_LINES = 2_000
CHAT = "/v1/chat/completions"
# In the order of their kills, one each eleventh of the batch.
KILLED = (
    "httpserver",
    "router",
    "worker",
    "detokenizer",
    "template",
    "launcher",
    "worker",
    "httpserver",
    "router",
)
FLAGS = ("--max-num-seqs", "32", "--max-engine-crashes", "1000")
PATIENCE_S = 1200.0  # for the whole batch on a busy machine
EXAMINED = 40  # lines whose answer is compared with the one that their request gets by itself


def body_of(place: int) -> dict[str, Any]:
    question = f"What is {place % 50} + {place // 50}?"
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 6, "temperature": 0}


def batch_of(server: Server, batch_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(httpx.TransportError):  # the HTTP server was killed
            answer = httpx.get(f"{server.base_url}/v1/batches/{batch_id}", timeout=60)
            if answer.status_code != 503:  # else the folder is not open yet
                assert answer.status_code == 200, answer.text
                found: dict[str, Any] = answer.json()
                return found
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)


def kill(server: Server, name: str) -> None:
    if name == "launcher":
        psutil.Process(server.pid).kill()
        return
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(ValueError, psutil.NoSuchProcess):  # the kill before has taken it, too
            server.named(name).kill()
            return
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.cpu_engine("a line's answer must be the one that its request gets by itself")
def test_each_line_is_answered_once_though_each_process_is_killed(tmp_path: Path) -> None:
    flags = ("--batch-dir", str(tmp_path / "batches"), *FLAGS)
    server = Server(None, *flags, ready_timeout=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    try:
        lines = [
            json.dumps({"custom_id": str(place), "method": "POST", "url": CHAT, "body": body_of(place)})
            for place in range(NUM_LINES)
        ]
        file = {"file": ("lines.jsonl", "\n".join(lines).encode())}
        sent = httpx.post(server.base_url + "/v1/files", files=file, data={"purpose": "batch"}, timeout=60)
        asked = {"input_file_id": sent.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = server.post("/v1/batches", asked)["id"]
        completed = [0]
        for turn, name in enumerate(KILLED, start=1):
            while completed[-1] < turn * NUM_LINES / (len(KILLED) + 2):
                assert time.monotonic() < deadline, server.log
                time.sleep(0.1)
                completed.append(batch_of(server, batch)["request_counts"]["completed"])
            kill(server, name)
            if name == "launcher":
                server.process.wait(60)
                assert server.survivors(10) == []
                server = Server(None, *flags, ready_timeout=PATIENCE_S)
        assert completed[-1] < NUM_LINES, "the batch was over before the last kill"
        assert completed == sorted(completed), "a line that had been answered was lost"
        while (ended := batch_of(server, batch))["status"] in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < deadline, server.log
            time.sleep(0.2)
        assert (ended["status"], ended["error_file_id"]) == ("completed", None), ended
        output = httpx.get(f"{server.base_url}/v1/files/{ended['output_file_id']}/content", timeout=60).text
        answers = [json.loads(line) for line in output.splitlines()]
        counts = collections.Counter(answer["custom_id"] for answer in answers)
        assert counts == collections.Counter(str(place) for place in range(NUM_LINES))
        assert ended["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        for answer in answers[:: NUM_LINES // EXAMINED]:
            alone = server.post(CHAT, body_of(int(answer["custom_id"])))
            assert answer["response"]["body"]["choices"] == alone["choices"]
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.kill()

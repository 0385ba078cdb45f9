"""A batch of 10,000 lines beside 8 streams, with a server that is killed in its middle: each line is answered once."""

from __future__ import annotations

import collections
import json
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.servers.server import Server, stream_events

NUM_LINES = 10_000
NUM_STREAMS = 8
TOKENS = 400  # of one answer of a stream
SHARE_BEFORE_KILL = 0.2  # of the lines: beside the streams they come slowly
PATIENCE_S = 3600.0  # for the whole batch on a busy machine


class Streams:
    """Clients that read one streamed answer after another until the server is lost."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.num_answers = 0
        self.cut_short: list[int] = []  # events of answers that ended too early while the server ran
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        body = {"prompt": "Once", "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self.is_over.is_set():
                try:
                    with client.stream("POST", "/v1/completions", json=body) as answer:
                        events = list(stream_events(answer))
                except httpx.HTTPError:  # the server was killed
                    return
                with self._lock:
                    self.num_answers += 1
                    if events[-1]["choices"][0]["finish_reason"] != "length" and not self.is_over.is_set():
                        self.cut_short.append(len(events))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)


def batch_of(client: httpx.Client, batch_id: str) -> dict[str, object]:
    found: dict[str, object] = client.get(f"/v1/batches/{batch_id}").json()
    return found


def completed_of(client: httpx.Client, batch_id: str) -> int:
    counts = client.get(f"/v1/batches/{batch_id}").json()["request_counts"]
    assert counts["failed"] == 0
    return int(counts["completed"])


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_each_line_is_answered_once_though_the_server_is_killed(tmp_path: Path) -> None:
    flags = ("--batch-dir", str(tmp_path / "batches"), "--max-num-seqs", "32")
    deadline = time.monotonic() + PATIENCE_S
    server = Server(None, *flags, ready_timeout=PATIENCE_S)
    try:
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
            lines = [
                json.dumps(
                    {
                        "custom_id": f"line-{place}",
                        "method": "POST",
                        "url": "/v1/chat/completions",
                        "body": {
                            "messages": [{"role": "user", "content": f"Say {place}."}],
                            "max_tokens": 4,
                        },
                    }
                )
                for place in range(NUM_LINES)
            ]
            file = {"file": ("lines.jsonl", "\n".join(lines).encode())}
            sent = client.post("/v1/files", files=file, data={"purpose": "batch"}).json()
            made = client.post(
                "/v1/batches",
                json={
                    "input_file_id": sent["id"],
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
            ).json()
            streams = Streams(server.base_url)
            while (before := completed_of(client, made["id"])) < SHARE_BEFORE_KILL * NUM_LINES or (
                streams.num_answers < NUM_STREAMS
            ):
                assert time.monotonic() < deadline, server.log
                time.sleep(0.5)
        assert before < NUM_LINES
        streams.is_over.set()
        for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
            process.kill()
        server.process.wait(60)
        streams.join()
        assert streams.cut_short == []
        server = Server(None, *flags, ready_timeout=PATIENCE_S)
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
            assert completed_of(client, made["id"]) >= before, "what was answered is not computed again"
            while (ended := batch_of(client, made["id"]))["status"] in (
                "validating",
                "in_progress",
                "finalizing",
            ):
                assert time.monotonic() < deadline, server.log
                time.sleep(0.5)
            assert (ended["status"], ended["error_file_id"]) == ("completed", None)
            assert ended["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
            output = client.get(f"/v1/files/{ended['output_file_id']}/content").text.splitlines()
        answers = [json.loads(line) for line in output]
        counts = collections.Counter(answer["custom_id"] for answer in answers)
        assert len(counts) == NUM_LINES
        assert set(counts.values()) == {1}
        assert all(answer["response"]["status_code"] == 200 for answer in answers)
        print(f"{before} lines before the kill, {streams.num_answers} answers of streams meanwhile")
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.kill()

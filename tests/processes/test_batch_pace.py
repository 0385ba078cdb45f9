"""How much of httpserver's CPU time a batch takes beside an answer."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from moeserve.httpserver.batches.line_pace import LINE_SHARE
from moeserve.messages.schema import BACKGROUND_PRIORITY, GenerateRequest
from tests.httpserver.batches.batch_files import client_of, completed, create, ended, jsonl, line
from tests.support.servers.http_harness import HttpServer, echo, http_server, silence
from tests.support.servers.waiting import within

PAUSE_S = 4.0


def answer(server: HttpServer, request: GenerateRequest) -> None:
    """Lines are answered at once, others never."""
    (echo if request.priority == BACKGROUND_PRIORITY else silence)(server, request)


def test_a_batch_leaves_the_process_to_another_answer(tmp_path: Path) -> None:
    """A batch of 400 lines, which an idle server answers in a second; beside an answer that is under way the process
    does little, and the rest follows at full speed when it has ended."""
    with http_server(batch_dir=str(tmp_path)) as server:
        server.answer = answer
        client = client_of(server)
        with client.completions.create(model="echo-model", prompt="Once", max_tokens=5, stream=True):
            assert within(30, lambda: len(server.requests) == 1)
            batch = create(client, jsonl(line(f"r{i}") for i in range(400)))
            assert within(60, lambda: completed(client, batch.id) >= 3)
            process = psutil.Process(server.process.pid)
            began, before = time.monotonic(), process.cpu_times()
            time.sleep(PAUSE_S)
            seconds, after = time.monotonic() - began, process.cpu_times()
            used = after.user + after.system - before.user - before.system
            assert used / seconds < 3 * LINE_SHARE
            assert completed(client, batch.id) < 400
        assert ended(client, batch.id).request_counts.completed == 400

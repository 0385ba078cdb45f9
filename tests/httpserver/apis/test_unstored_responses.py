"""A response that cannot be stored, since the disk takes nothing more."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.support.servers.http_harness import http_server


def test_an_answer_that_cannot_be_stored_is_answered(tmp_path: Path) -> None:
    with http_server(data_dir=str(tmp_path)) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        answer = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 16})
        assert answer.status_code == 200, answer.text
        assert answer.json()["output"]
        assert answer.json()["store"] is False
        assert server.get("/v1/responses/" + answer.json()["id"]).status_code == 404

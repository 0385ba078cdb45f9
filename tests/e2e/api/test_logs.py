"""The log of a real server with --log-format json: every line of every process."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.completions import TEXT, streamed
from tests.support.servers.server import Server, clean_environment, command, running_server

ALWAYS = {"time", "level", "process", "pid", "logger", "message"}
JSON_LOG = ("--log-format", "json", "--log-level", "debug")


def lines_of(log: str) -> list[dict[str, Any]]:
    """Fails on a line that is not a JSON object with all that a line must have."""
    lines = [json.loads(line) for line in log.splitlines()]
    for line in lines:
        assert line.keys() >= ALWAYS, line
        when = datetime.fromisoformat(line["time"])
        assert abs((datetime.now(UTC) - when).total_seconds()) < 600
    return lines


def ask(server: Server, request_id: str | None, **body: Any) -> httpx.Response:
    headers = {} if request_id is None else {"x-request-id": request_id}
    body = {"prompt": TEXT, "max_tokens": 4, "ignore_eos": True} | body
    return httpx.post(server.base_url + "/v1/completions", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def lines(tiny_model: Path) -> list[dict[str, Any]]:
    with running_server(tiny_model, *JSON_LOG) as server:
        assert ask(server, "whole-1").headers["x-request-id"] == "whole-1"
        assert ask(server, "refused-1", temperature=9).status_code == 400
        gone = streamed(server, prompt=TEXT, max_tokens=400)
        next(gone)
        gone.close()
        for bad in ("x" * 129, "two words", ""):  # one of ours takes its place
            assert ask(server, bad).headers["x-request-id"] != bad
        httpx.get(server.base_url + "/nothing%0Ahere")
        httpx.get(server.base_url + "/health")
        assert server.stop() == 0
        log = server.log
    return lines_of(log)


def test_every_process_speaks(lines: list[dict[str, Any]]) -> None:
    assert {line["process"] for line in lines} == {
        "launcher",
        "httpserver",
        "router",
        "worker",
        "detokenizer",
    }


def test_a_request_can_be_followed_through_the_processes(lines: list[dict[str, Any]]) -> None:
    way = [line for line in lines if line.get("request_id") == "whole-1"]
    assert {line["process"] for line in way} == {"httpserver", "router", "worker", "detokenizer"}
    (access,) = (line for line in way if line["logger"] == "moeserve.httpserver.access")
    assert access["level"] == "info"
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert (access["completion_tokens"], access["finish_reasons"]) == (4, ["length"])
    assert 0 < access["first_token_ms"] <= access["duration_ms"]


def test_a_refusal_says_why(lines: list[dict[str, Any]]) -> None:
    (refused,) = (line for line in lines if line.get("request_id") == "refused-1")
    assert (refused["level"], refused["status"]) == ("info", 400)
    assert refused["error"].startswith("temperature: ")


def test_a_client_that_goes_is_told_of(lines: list[dict[str, Any]]) -> None:
    (gone,) = (line for line in lines if line.get("finish_reasons") == ["abort"])
    assert gone["status"] == 200  # its stream had begun
    assert gone["prompt_tokens"] > 0  # as far as it came
    assert gone["completion_tokens"] > 0
    ends = [line for line in lines if line.get("request_id") == gone["request_id"]]
    assert any(line["process"] == "router" and "client has gone" in line["message"] for line in ends)


def test_probes_are_quiet_and_paths_stay_on_their_line(lines: list[dict[str, Any]]) -> None:
    assert {line["level"] for line in lines if line.get("path") == "/health"} == {"debug"}
    (odd,) = (line for line in lines if line.get("status") == 404)
    assert odd["path"] == "/nothing\nhere"


@pytest.mark.parametrize(("name", "code"), [("bad.gguf", 1), ("missing.gguf", 2)])
def test_a_failed_start_is_in_json_too(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    start = subprocess.run(
        command(tmp_path / name, "--port", "0", *JSON_LOG),
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
    )
    assert start.returncode == code
    assert start.stdout == ""
    assert any(line["level"] == "error" and name in line["message"] for line in lines_of(start.stderr))

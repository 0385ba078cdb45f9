"""A server that dumps its first steps, and goes on."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from moeserve.cli.compare_dumps.reader import Dump
from moeserve.cli.main import main
from tests.support.servers.server import running_server

PROMPT = list(range(20, 40))


@pytest.mark.slow  # tests/kernels/engines/test_dump.py has the dump
def test_the_first_steps_are_dumped_and_the_server_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dump"
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with running_server(tiny_model, "--debug-dump", str(folder), "--debug-dump-steps", "3") as server:
        first = httpx.post(server.base_url + "/v1/completions", json=body, timeout=60)
        second = server.post("/v1/completions", body)
        assert second["choices"][0]["text"] == first.json()["choices"][0]["text"]
    assert "the debug dump is complete: 3 steps" in server.log
    dump = Dump(folder)
    assert dump.rows.token[: len(PROMPT)].tolist() == PROMPT
    assert len(dump.rows.token) == len(PROMPT) + 2
    assert first.headers["x-request-id"] in dump.steps[0].requests.values()
    assert main(["compare-dumps", str(folder), str(folder)]) == 0

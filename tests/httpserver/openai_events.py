"""Prompts for OpenAI's APIs, and the events of their streams."""

from __future__ import annotations

import json
from typing import Any

from tests.support.servers.http_harness import HttpServer

TEXT = "The quick brown fox jumps over the lazy dog."
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who jumps?"}]


def events(server: HttpServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = [line for line in server.post(path, body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

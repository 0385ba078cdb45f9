"""The events of a stream of OpenAI's APIs."""

from __future__ import annotations

import json
from typing import Any

from tests.support.http_harness import HttpServer


def events(server: HttpServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = [line for line in server.post(path, body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

"""`return_progress`, all the way from the worker's steps to the client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.completions import TEXT, streamed
from tests.support.servers.server import Server

LONG = TEXT * 100
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
}


def progress_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["prompt_progress"] for event in events if "prompt_progress" in event]


@pytest.mark.parametrize("path", BODIES)
def test_a_long_prompt_is_followed(server: Server, path: str) -> None:
    body = BODIES[path] | {"cache_salt": path, "return_progress": True}
    events = list(streamed(server, path, **body))
    progress = progress_of(events)
    timings = events[-1]["timings"]
    done = [one["processed"] for one in progress]
    assert len(done) >= 2
    assert done == sorted(set(done))
    assert done[-1] == timings["prompt_tokens"]
    assert all((one["total"], one["cache"]) == (done[-1], 0) for one in progress)
    assert 0 < progress[0]["time_ms"] < progress[-1]["time_ms"] <= timings["prefill_ms"] + 1
    first_text = next(i for i, event in enumerate(events) if text_of(event))
    last_progress = max(i for i, event in enumerate(events) if "prompt_progress" in event)
    assert last_progress < first_text
    again = progress_of(list(streamed(server, path, **body)))
    assert again[-1]["cache"] > 0.9 * done[-1], "read from the cache the second time"
    assert again[-1]["processed"] == done[-1]


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def test_it_comes_only_when_asked_for(server: Server) -> None:
    events = list(streamed(server, prompt=LONG))
    assert progress_of(events) == []

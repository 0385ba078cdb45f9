"""A worker on a GPU that is killed under 16 greedy and 8 sampled streams: they go on, with the usage that they would
have had."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.completions import is_empty
from tests.e2e.survival.killed_answers import (
    Asked,
    all_at_once,
    generated,
    has_generated,
    health,
    many_bodies,
)
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
KILLS = 2
TOKENS = 200  # of each answer
BACK_S = 8  # of a model that loads at once; a first start takes far longer


def test_answers_go_on_when_the_worker_is_killed(tiny_model: Path) -> None:
    flags = ["--device", "cuda", "--max-engine-crashes", "10"]
    with running_server(tiny_model, *flags, ready_timeout=200) as server:
        requests = many_bodies(TOKENS)
        expected, _ = answers(server, requests, kill=False)
        for _ in range(KILLS):
            said, pause = answers(server, requests, kill=True)
            for asked, before, after in zip(requests, expected, said, strict=True):
                assert_usage(asked, before, after)
            print(f"SURVIVED: the longest pause was {pause:.2f} s")
        assert within(5, lambda: is_empty(server))
        assert server.metrics()["moeserve:engine_losses_total"] == KILLS


def answers(server: Server, requests: list[Asked], *, kill: bool) -> tuple[list[Any], float]:
    """What `stream` has of each, and the longest pause in seconds."""
    before, losses = generated(server), server.metrics()["moeserve:engine_losses_total"]
    with all_at_once(server, requests) as futures:
        if kill:
            assert within(60, partial(has_generated, server, before + 200))
            server.named("worker").kill()
            began = time.monotonic()
            assert within(20, lambda: is_lost(server, losses + 1))
            assert within(20, lambda: health(server) == 200)
            assert time.monotonic() - began < BACK_S
            print(f"RECOVERED: /health is 200 after {time.monotonic() - began:.2f} s")
        results = [future.result() for future in futures]
    return [said for said, _ in results], max(pause for _, pause in results)


def is_lost(server: Server, times: float) -> bool:
    return server.metrics()["moeserve:engine_losses_total"] == times


def assert_usage(asked: Asked, before: Any, after: Any) -> None:
    """Equal where the end does not depend on the text, which may take another course on a GPU."""
    path, body = asked
    (choices, usage), (choices_after, usage_after) = before, after
    assert usage_after["prompt_tokens"] == usage["prompt_tokens"]
    assert len(choices_after) == len(choices)
    if path == "/v1/completions":
        assert usage_after == usage
        assert [end for _, _, end in choices_after] == [end for _, _, end in choices]
        if body.get("logprobs"):
            assert [len(logprobs) for _, logprobs, _ in choices_after] == [len(n) for _, n, _ in choices]
    elif "response_format" in body:
        ((text, _, end),) = choices_after
        assert end == "length" or set(json.loads(text)) == {"name", "sizes"}

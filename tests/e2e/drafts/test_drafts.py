"""A server that drafts: every answer is the one of a server that does not, whoever else is there and whoever dies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.command_line import demonstration_model
from tests.e2e.completions import TEXT, is_empty
from tests.e2e.drafts.drafted_answers import ACCEPTED, DRAFTED, FEW, NGRAM, always_drafting
from tests.e2e.survival.killed_answers import (
    Asked,
    all_at_once,
    generated,
    has_generated,
    many_bodies,
    schema,
    stream,
    text,
)
from tests.support.nightly import nightly_after
from tests.support.servers.server import Server
from tests.support.servers.waiting import within


def requests() -> list[Asked]:
    """Those of `many_bodies`, and some with what else an answer may depend on."""
    return [
        *many_bodies(100),
        text(1, 100, prompt=TEXT * 3, stop=["the ", "e o"]),
        text(2, 100, temperature=1.5, seed=11),
        text(2, 100, temperature=0.7, seed=12, logprobs=5),
        schema(temperature=1.5, seed=9),
        # Of few tokens, so that what follows has been there before.
        *(text(i, 100, temperature=1, seed=i, logprobs=1, logit_bias=FEW) for i in range(4)),
    ]


@pytest.fixture(scope="module")
def drafting(tiny_model: Path) -> Iterator[Server]:
    flags = "--speculative-config", NGRAM % 4, "--max-engine-crashes", "10"
    with always_drafting(tiny_model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Any]:
    with all_at_once(server, requests()) as futures:
        return [future.result()[0] for future in futures]


@pytest.mark.slow
@pytest.mark.cpu_engine("drafts are the CPU's so far")
def test_alone_and_in_a_crowd(drafting: Server, expected: list[Any]) -> None:
    with all_at_once(drafting, requests()) as futures:
        assert [future.result()[0] for future in futures] == expected
    alone = [stream(drafting, path, body)[0] for path, body in requests()[::3]]
    assert alone == expected[::3]
    metrics = drafting.metrics()
    assert metrics[ACCEPTED] > 50
    assert metrics[DRAFTED] > metrics[ACCEPTED]
    assert metrics["vllm:spec_decode_num_drafts_total"] > 20
    assert within(30, lambda: is_empty(drafting))


@pytest.mark.cpu_engine("drafts are the CPU's so far")
@pytest.mark.parametrize("name", nightly_after(1, ["router", "worker"]))
def test_killed_in_the_middle(drafting: Server, expected: list[Any], name: str) -> None:
    begun_at = generated(drafting)
    with all_at_once(drafting, requests()) as futures:
        assert within(60, partial(has_generated, drafting, begun_at + 100))
        drafting.named(name).kill()
        assert [future.result()[0] for future in futures] == expected
    assert within(30, lambda: is_empty(drafting))


@pytest.mark.cpu_engine("drafts for sampled requests take their noise into account on the CPU alone")
def test_a_model_that_drafts(demonstration: Server) -> None:
    """The demonstration model, for itself: what it drafts at temperature 0 is right. Another worker begins with none of
    its KV."""
    bodies = [
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}),
        (
            "/v1/completions",
            {"prompt": "The little dog", "max_tokens": 60, "temperature": 0.7, "seed": 5},
        ),
    ]
    expected = [stream(demonstration, *body)[0] for body in bodies]
    path = demonstration_model()
    with always_drafting(path, "--speculative-model", str(path)) as server:
        assert stream(server, *bodies[0])[0] == expected[0]
        metrics = server.metrics()
        assert metrics[ACCEPTED] == metrics[DRAFTED] > 2
        server.named("worker").kill()
        assert [stream(server, *body)[0] for body in bodies] == expected

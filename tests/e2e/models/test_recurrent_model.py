"""A recurrent model through the whole server: whose steps it shares, snapshots, preemption, and llama.cpp's text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import OWN_FIXTURES, fixtures_dir
from tests.e2e.completions import at_once, completion
from tests.support.measuring.accuracy import Fixture as Golden
from tests.support.measuring.accuracy import served_greedy
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

MODEL = OWN_FIXTURES / "tiny-qwen3next-q4_k_m.gguf"
FAMILIES = ("qwen3next", "qwen35moe")
CLEAR_MARGIN = 0.1  # of llama.cpp's logits; the greedy text is a yardstick before the first step below it
cpu_engine = pytest.mark.cpu_engine("a GPU's kernels depend on how many rows a step has")


@pytest.fixture(scope="module")
def recurrent() -> Iterator[Server]:
    """Its KV is too small for all that run: some are preempted."""
    with running_server(MODEL, "--max-num-seqs", "8", "--max-total-tokens", "320") as running:
        yield running


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    golden = json.loads((OWN_FIXTURES / f"{MODEL.stem}.golden.json").read_text())
    return [token for case in golden["cases"] for token in case["tokens"]]


def requests_of(tokens: list[int]) -> list[dict[str, Any]]:
    """Requests of several lengths, greedy and sampled. All prompts fit at first; prompts and answers together do
    not."""
    return [
        {
            "prompt": tokens[5 * i : 5 * i + 16 + 6 * i],
            "max_tokens": 70,
            "temperature": 0.9 * (i % 2),
            "seed": i,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"{i}",
        }
        for i in range(8)
    ]


@pytest.mark.slow
@cpu_engine
def test_alone_in_a_crowd_and_preempted(recurrent: Server, tokens: list[int]) -> None:
    requests = requests_of(tokens)
    alone = [completion(recurrent, **request) for request in requests]
    salted = [request | {"cache_salt": f"crowd {i}"} for i, request in enumerate(requests)]
    before = recurrent.metrics()["moeserve:num_preemptions_total"]
    assert at_once(lambda request: completion(recurrent, **request), salted) == alone
    assert within(30, lambda: recurrent.metrics()["moeserve:num_preemptions_total"] > before)


@cpu_engine
def test_the_next_turn_continues_from_a_snapshot(recurrent: Server, tokens: list[int]) -> None:
    """With the same bits as computed anew."""
    first = {"prompt": tokens[:100], "max_tokens": 20, "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = completion(recurrent, **first, cache_salt="talk")["logprobs"]["tokens"]
    said = [int(token.removeprefix("token_id:")) for token in answer]
    turn = {"prompt": tokens[:100] + said + tokens[100:130], "temperature": 0, "ignore_eos": True, "max_tokens": 20,
            "logprobs": 5}  # fmt: skip
    continued = recurrent.post("/v1/completions", turn | {"cache_salt": "talk"})
    anew = recurrent.post("/v1/completions", turn | {"cache_salt": "another talk"})
    assert continued["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100
    assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert continued["choices"] == anew["choices"]


@pytest.mark.skipif(fixtures_dir() is None, reason="the wider fixtures are not here (MOESERVE_FIXTURES)")
@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[1:])]
)
def test_greedy_text_is_llama_cpps(family: str) -> None:
    """With F16 weights: with quantised ones llama.cpp's own rounding decides."""
    folder = fixtures_dir()
    assert folder is not None
    golden = Golden.load(folder / f"families/tiny-{family}-f16.golden.json")
    with running_server(folder / f"families/tiny-{family}-f16.gguf") as server:
        for case in golden.cases:
            length = next((i for i, m in enumerate(case.margins) if m < CLEAR_MARGIN), len(case.greedy))
            served = served_greedy(server.base_url, case.tokens, len(case.greedy))
            assert served[:length] == case.greedy[:length]

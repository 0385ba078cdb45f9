"""The same request gives the same tokens and bit-identical logprobs, whoever shares its steps.

A GPU chooses its kernels by the number of rows in a step, and they round differently: there a request gives the same
again in steps of the same rows (docs/explanation/gpu-engine.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OWN_FIXTURES
from tests.e2e.completions import at_once, completion
from tests.support.servers.server import Server, running_server

CROWD = 16
whoever_shares_its_steps = pytest.mark.cpu_engine("a GPU's kernels depend on how many rows a step has")


@pytest.fixture(scope="module")
def chunked_server(tiny_model: Path) -> Iterator[Server]:
    """Prefills at most 7 tokens a step, so that chunk borders fall everywhere."""
    with running_server(tiny_model, "--max-num-batched-tokens", "7", "--threads", "2") as running:
        yield running


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    """16 prompts of 3 to 123 tokens; every other one sampled, with a seed."""
    golden = json.loads((OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.golden.json").read_text())
    ids = [token for case in golden["cases"] for token in case["tokens"]]
    return [
        {
            "prompt": ids[9 * i : 9 * i + 3 + 8 * i],
            "max_tokens": 32,
            "temperature": 0.8 * (i % 2),
            "top_k": 50,
            "seed": i,
            "echo": True,
            "logprobs": 20,
            "return_tokens_as_token_ids": True,
        }
        for i in range(CROWD)
    ]


@pytest.fixture(scope="module")
def alone(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [completion(server, **request) for request in requests]


def test_prompts_and_answers_differ(alone: list[dict[str, Any]]) -> None:
    assert len({json.dumps(answer["logprobs"]["tokens"]) for answer in alone}) == CROWD


def test_the_same_steps_give_the_same(
    server: Server, requests: list[dict[str, Any]], alone: list[dict[str, Any]]
) -> None:
    """Alone again, from the first token on: nobody finds what another salt has cached."""
    again = [completion(server, **request, cache_salt="again") for request in requests]
    assert again == alone


@whoever_shares_its_steps
def test_decoding_equals_scoring_the_same_text(
    server: Server, requests: list[dict[str, Any]], alone: list[dict[str, Any]]
) -> None:
    """Token by token or all at once: bit-identical logprobs."""
    for request, answer in zip(requests, alone, strict=True):
        tokens = [int(token.removeprefix("token_id:")) for token in answer["logprobs"]["tokens"]]
        scored = completion(server, **request | {"prompt": tokens, "max_tokens": 0})
        assert scored["logprobs"] == answer["logprobs"]


@whoever_shares_its_steps
def test_crowd_equals_one_by_one(server: Server, requests: list[dict[str, Any]], alone: list[Any]) -> None:
    assert at_once(lambda request: completion(server, **request), requests) == alone


@pytest.mark.slow
@whoever_shares_its_steps
def test_chunks_of_seven_equal_one_by_one(
    chunked_server: Server, requests: list[dict[str, Any]], alone: list[Any]
) -> None:
    assert at_once(lambda request: completion(chunked_server, **request), requests) == alone
    assert completion(chunked_server, **requests[-1]) == alone[-1]


@pytest.fixture(scope="module")
def q8_server(tiny_model: Path) -> Iterator[Server]:
    with running_server(
        tiny_model, "--kv-cache-dtype", "q8_0", "--max-num-batched-tokens", "7", "--threads", "2"
    ) as running:
        yield running


@pytest.mark.slow  # a server of its own; tests/kernels has the same of the kernels
@whoever_shares_its_steps
def test_a_kv_cache_of_8_bits(q8_server: Server, requests: list[dict[str, Any]], alone: list[Any]) -> None:
    """One by one, in a crowd that finds its prompts cached, and in one that does not."""
    some = requests[-3:]
    mine = [completion(q8_server, **request) for request in some]
    assert at_once(lambda request: completion(q8_server, **request), some) == mine
    assert at_once(lambda request: completion(q8_server, **request, cache_salt="again"), some) == mine
    assert mine != alone[-3:]

"""gpt-oss and Gemma 4 with a KV pool of their own for windowed layers, through the whole server: the same bits as with
one pool, in a crowd, and where a conversation goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import family_models, fixtures_dir
from tests.e2e.completions import at_once, completion
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(fixtures_dir() is None, reason="the wider fixtures are not here (MOESERVE_FIXTURES)"),
    pytest.mark.cpu_engine("a GPU's kernels depend on how many rows a step has"),
]
MODELS = ("tiny-gptoss-mxfp4", "tiny-gemma4-q4_k_m")  # windows of 32 and 16 tokens
FLAGS = ("--max-num-seqs", "8", "--max-total-tokens", "900", "--max-num-batched-tokens", "64")


def model_of(name: str) -> Path:
    (model,) = (each for each in family_models(name.split("-")[1]) if each.stem == name)
    return model


def tokens_of(model: Path) -> list[int]:
    golden = json.loads((model.parent / f"{model.stem}.golden.json").read_text())
    return [token for case in golden["cases"] for token in case["tokens"]]


def requests_of(tokens: list[int], salt: str) -> list[dict[str, Any]]:
    """Requests of several lengths, greedy and sampled. All prompts fit at first; prompts and answers together do
    not."""
    return [
        {
            "prompt": tokens[5 * i : 5 * i + 16 + 12 * i],
            "max_tokens": 100,
            "temperature": 0.9 * (i % 2),
            "seed": i,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"{salt} {i}",
        }
        for i in range(8)
    ]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Path:
    return model_of(str(request.param))


@pytest.fixture(scope="module")
def alone(model: Path) -> list[dict[str, Any]]:
    """What a server with one pool says."""
    with running_server(model, *FLAGS, "--kv-window-ratio", "0") as server:
        assert server.metrics()["moeserve:kv_window_slots_total"] == 0
        return [completion(server, **request) for request in requests_of(tokens_of(model), "alone")]


@pytest.fixture(scope="module")
def windowed(model: Path) -> Iterator[Server]:
    with running_server(model, *FLAGS, "--kv-window-ratio", "0.2") as server:
        yield server


def test_the_same_bits_as_with_one_pool(windowed: Server, model: Path, alone: list[dict[str, Any]]) -> None:
    """One by one, then all together, where some may be preempted."""
    before = windowed.metrics()
    slots = before["moeserve:kv_window_slots_total"]
    assert 0 < slots < before["moeserve:kv_cache_slots_total"] == 900
    tokens = tokens_of(model)
    assert [completion(windowed, **request) for request in requests_of(tokens, "alone")] == alone
    crowd = requests_of(tokens, "crowd")
    assert at_once(lambda request: completion(windowed, **request), crowd) == alone
    assert within(30, lambda: windowed.metrics()["moeserve:kv_window_slots_used"] == 0)


def test_the_next_turn_continues_from_an_segment(windowed: Server, model: Path) -> None:
    """With the same bits as computed anew; also where it departs from what was said."""
    tokens = tokens_of(model)
    first = {"prompt": tokens[:100], "max_tokens": 40, "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = completion(windowed, **first, cache_salt="talk")["logprobs"]["tokens"]
    said = [int(token.removeprefix("token_id:")) for token in answer]
    turns = [(tokens[:100] + said + tokens[100:130], 138), (tokens[:97] + said[::-1] + tokens[:20], 97)]

    def hits_exceed(before: float) -> bool:
        return windowed.metrics()["moeserve:kv_window_hits_total"] > before

    for number, (prompt, least) in enumerate(turns):
        turn = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 40, "logprobs": 5}
        hits = windowed.metrics()["moeserve:kv_window_hits_total"]
        continued = windowed.post("/v1/completions", turn | {"cache_salt": "talk"})
        anew = windowed.post("/v1/completions", turn | {"cache_salt": f"another talk {number}"})
        assert continued["usage"]["prompt_tokens_details"]["cached_tokens"] >= least
        assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert continued["choices"] == anew["choices"]
        assert within(30, partial(hits_exceed, hits))


def test_beams_read_their_windows(windowed: Server, model: Path) -> None:
    """Longer than the window, and as with one pool."""
    search = {
        "prompt": tokens_of(model)[:50],
        "max_tokens": 50,
        "use_beam_search": True,
        "n": 3,
        "ignore_eos": True,
    }
    with running_server(model, *FLAGS, "--kv-window-ratio", "0") as server:
        expected = server.post("/v1/completions", search)["choices"]
    assert windowed.post("/v1/completions", search)["choices"] == expected
    assert within(30, lambda: windowed.metrics()["moeserve:kv_window_slots_used"] == 0)

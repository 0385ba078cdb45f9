"""The latest reports of speculative decoding in other servers, June to September 2026, asked as in
test_reported_drafts.py: of prompts' logprobs, probabilities, cached prefixes, a disk tier and EAGLE-3 heads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from tests.conftest import OWN_FIXTURES
from tests.e2e.completions import TEXT, at_once
from tests.e2e.drafts.drafted_answers import ACCEPTED, DRAFTED, FEW, NGRAM, always_drafting, same
from tests.e2e.survival.killed_answers import Asked, call, schema, text
from tests.support.models.eagle3_head import Head
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine("answers are the same bit for bit on the CPU alone")]


@pytest.fixture(scope="module")
def eagle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for which a head drafts that is hardly ever right."""
    shape = read_shape(open_model(tiny_model))
    taps = [1, shape.num_layers // 2, shape.num_layers]
    head = Head(shape.hidden_size, shape.vocab_size, taps, scored=512)
    file = head.write_gguf(tmp_path_factory.mktemp("head") / "head.gguf")
    drafts = json.dumps({"method": "eagle3", "model": str(file), "num_speculative_tokens": 3})
    with always_drafting(tiny_model, "--speculative-config", drafts) as running:
        yield running


def test_prompts_are_scored_beside_drafts(plain: Server, drafting: Server) -> None:
    """vllm#53488: prompt_logprobs are wrong for some prompts that are read in pieces. vllm#41834: answers beside
    others' prompts have tokens that were not sampled."""
    scored = [text(0, 1, prompt=f"{at} {TEXT * (3 + at)}", echo=True, logprobs=1) for at in range(8)]
    answers = [
        text(at, 70, prompt=[300, 310, 320, 330] * 9, temperature=1, seed=at, logit_bias=FEW)
        for at in range(4)
    ]
    same(plain, drafting, [*answers, *scored, *answers])


def test_probabilities_of_drafted_tokens(plain: Server, drafting: Server) -> None:
    """llama.cpp#27972: every token has probability 1, in llama-server's form. Asked again, the answer is drafted."""
    body: dict[str, Any] = {
        "prompt": [300, 310, 320, 330] * 9, "n_predict": 30, "n_probs": 3, "seed": 5, "temperature": 1,
        "logit_bias": [[int(token), 100.0] for token in FEW], "ignore_eos": True,
    }  # fmt: skip
    before = drafting.metrics()[ACCEPTED]
    expected, _, found = (server.post("/completion", body) for server in (plain, drafting, drafting))
    assert within(30, lambda: drafting.metrics()[ACCEPTED] > before)  # counted behind the answer
    assert found["completion_probabilities"] == expected["completion_probabilities"]
    assert len({round(each["logprob"], 3) for each in found["completion_probabilities"]}) > 5


@pytest.mark.parametrize("model", ["tiny-qwen3moe-q4_k_m", "tiny-qwen3next-q4_k_m"])
def test_as_much_of_a_prompt_is_cached(model: str) -> None:
    """vllm#53670, #38182, vLLM-2080Ti-Definitive#149: drafts cost a block of each cached prefix, or all of it."""
    path = OWN_FIXTURES / f"{model}.gguf"
    prompts = [[30, 31, 32, 33] * count for count in (9, 17, 40)]
    cached = []
    flags = "--speculative-config", NGRAM % 4
    for running in (running_server(path), always_drafting(path, *flags)):
        with running as server:
            asked = [
                text(at, 12, prompt=[*prompt, 40 + turn], logit_bias={"30": 100, "31": 100}, temperature=0)
                for turn in range(3)
                for at, prompt in enumerate(prompts)
            ]
            answers = [server.post(path_, body | {"ignore_eos": True}) for path_, body in asked]
            cached.append([one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers])
    assert cached[0] == cached[1]
    assert max(cached[1]) > 100


def test_recurrent_states_behind_a_disk(tmp_path: Path) -> None:
    """vllm#53505: with a store of prefixes, drafts spoil the states of recurrent layers."""
    path = OWN_FIXTURES / "tiny-qwen3next-q4_k_m.gguf"
    few = {str(token): 100 for token in (30, 31, 32)}
    asked = [
        text(at, 60, prompt=[30, 31, 32, 33] * (4 + 9 * at), temperature=at % 2, seed=at, logit_bias=few)
        for at in range(5)
    ]
    flags = (
        *("--speculative-config", NGRAM % 4, "--max-total-tokens", "512", "--max-model-len", "256"),
        *("--kv-disk", str(tmp_path / "tier"), "--kv-disk-gib", "0.5"),
    )
    with running_server(path) as plain, always_drafting(path, *flags) as server:
        for _ in range(3):
            same(plain, server, asked)
        assert within(30, lambda: server.metrics()["moeserve:kv_disk_pages"] > 0)


def test_forms_and_logprobs_with_a_head(plain: Server, eagle: Server) -> None:
    """sglang#20148, #15050: requests with a JSON schema crash beside EAGLE-3; #17349: logprobs fail."""
    before = eagle.metrics()[DRAFTED]
    for turn in range(2):
        asked: list[Asked] = [
            *(schema(temperature=1, seed=2 * turn + at) for at in range(2)),
            call(60, temperature=1, seed=turn),
            text(turn, 40, temperature=1, seed=turn, logprobs=3, presence_penalty=0.5),
        ]
        same(plain, eagle, asked, accepted=0)
    assert within(30, lambda: eagle.metrics()[DRAFTED] > before)


def test_two_requests_are_two(plain: Server, eagle: Server) -> None:
    """rtx6kpro#63: texts are spoilt as soon as a second sequence is in the batch, in some starts only."""
    asked = [text(at, 40, temperature=at % 2, seed=at) for at in range(8)]
    expected = [plain.post(path, body)["choices"] for path, body in asked]
    for _ in range(2):
        assert at_once(lambda one: eagle.post(*one)["choices"], asked) == expected

"""Further reports of speculative decoding in other servers, asked as in test_reported_drafts.py: of stops and limits
inside a draft, seeds, the end of the context, clients that leave, windows, and prefixes in scattered slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import OWN_FIXTURES
from tests.e2e.completions import TEXT, at_once, is_empty
from tests.e2e.drafts.drafted_answers import (
    COMPLETIONS,
    FEW,
    NGRAM,
    always_drafting,
    drafting_server,
    same,
)
from tests.e2e.survival.killed_answers import CHAT, Asked, text
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine("answers are the same bit for bit on the CPU alone")]

CONTEXT = 128


@pytest.fixture(scope="module")
def long_drafts(tiny_model: Path) -> Iterator[Server]:
    """Rows have up to 16 drafts, in a short context."""
    flags = "--speculative-config", NGRAM % 16, "--max-model-len", str(CONTEXT)
    with always_drafting(tiny_model, *flags) as running:
        yield running


def repeating(seed: int, tokens: int, **how: Any) -> Asked:
    prompt = [300, 310, 320, 330] * 10
    return text(seed, tokens, prompt=prompt, temperature=1, seed=seed, logit_bias=FEW, **how)


def special(tag: str, server: Server) -> str:
    (id,) = server.post("/tokenize", {"prompt": tag})["tokens"]
    return str(id)


def only_at_the_end(said: str) -> str:
    """The shortest end of a text that it has nowhere else."""
    return next(said[at:] for at in range(len(said) - 1, -1, -1) if said.find(said[at:]) == at)


def test_reasoning_is_a_part_of_the_answer(plain: Server, drafting: Server) -> None:
    """sglang#39826: reasoning that is cut within a draft counts more tokens than the answer has."""
    bias = FEW | {special("<think>", plain): 100, special("</think>", plain): -100}
    asked = [
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": f"{seed} Well?"}],
                "logit_bias": bias,
                "stop_token_ids": [310],
                "min_tokens": 17 + seed,
                "max_tokens": 60,
                "temperature": 1,
                "seed": seed,
            },
        )
        for seed in range(8)
    ]
    for (path, body), whole in zip(asked, same(plain, drafting, asked, accepted=0), strict=True):
        usage = whole["usage"]
        counts = usage["completion_tokens_details"]
        assert counts == plain.post(path, body, 120.0)["usage"]["completion_tokens_details"]
        assert counts["reasoning_tokens"] <= usage["completion_tokens"]


def test_a_stop_string_and_the_limit_in_one_draft(plain: Server, long_drafts: Server) -> None:
    """sglang#31599: a stop string just before max_tokens is not seen, and the tokens behind it are told."""
    asked = []
    for limit in range(24, 32):
        path, body = repeating(1, limit)
        said = plain.post(path, body | {"max_tokens": limit - 2}, 120.0)["choices"][0]["text"]
        asked.append((path, body | {"stop": [only_at_the_end(said)]}))
    same(plain, long_drafts, asked)


def test_a_stop_string_at_the_beginning_of_a_long_draft(plain: Server, long_drafts: Server) -> None:
    """sglang#23802: only the last tokens of a draft are searched for stop strings."""
    path, body = repeating(2, 48)
    said = plain.post(path, body, 120.0)["choices"][0]["text"]
    same(plain, long_drafts, [(path, body | {"stop": [said[at:][:5]]}) for at in range(8, 56, 4)], accepted=0)


def test_tokens_and_logprobs_end_at_a_stop_string(plain: Server, long_drafts: Server) -> None:
    """vllm#47616: token ids and logprobs of accepted tokens behind a stop string are told."""
    path, body = repeating(3, 48, logprobs=2, return_token_ids=True)
    said = plain.post(path, body, 120.0)["choices"][0]["text"]
    for at in range(9, 49, 8):
        stopped = body | {"stop": [said[at:][:6]]}
        (expected,) = plain.post(path, stopped, 120.0)["choices"]
        (found,) = long_drafts.post(path, stopped, 120.0)["choices"]
        assert found == expected


def test_the_end_is_accepted_in_the_middle(plain: Server, drafting: Server) -> None:
    """huggingface/transformers#47912, koboldcpp#1276: an answer goes on behind an end that was drafted."""
    bias = FEW | {special("<|im_end|>", plain): 96}
    messages = [{"role": ("user", "assistant")[i % 2], "content": "Well?"} for i in range(9)]
    body = {"messages": messages, "logit_bias": bias, "temperature": 2, "max_tokens": 80}
    asked = [(CHAT, body | {"seed": seed, "min_tokens": 12 + seed}) for seed in range(8)]
    same(plain, drafting, asked, accepted=0)


def test_seeds_of_parallel_requests(plain: Server, drafting: Server) -> None:
    """vllm#6038: drafts ignore a request's seed; vllm#9441: requests of other seeds beside it spoil an answer."""
    asked = [text(0, 40, temperature=2, seed=at % 4, logit_bias=FEW) for at in range(12)]
    asked += [text(at, 60, logit_bias=FEW) for at in range(4)]
    said = [whole["choices"][0]["text"] for whole in same(plain, drafting, asked)][:12]
    assert said == said[:4] * 3
    assert len(set(said)) == 4


def test_to_the_end_of_the_context(plain: Server, long_drafts: Server) -> None:
    """llama.cpp#10547: drafts behind the end of a slot's context end the server."""
    rooms = (1, 2, 3, 15, 16, 17, 18, 33)
    asked = [
        text(room, room, prompt=[300, 310, 320, 330] * 32, temperature=1, seed=room, logit_bias=FEW)
        for room in rooms
    ]
    for room, (_, body) in zip(rooms, asked, strict=True):
        body["prompt"] = body["prompt"][: CONTEXT - room]
    for room, whole in zip(rooms, same(plain, long_drafts, asked), strict=True):
        assert whole["usage"]["completion_tokens"] == room


def test_clients_that_leave_take_no_drafts_with_them(plain: Server, drafting: Server) -> None:
    """am17an/llama.cpp#20: the slot of a client that leaves is never free; omlx#2235: from then on there are no
    drafts."""

    def leave(seed: int) -> None:
        body = text(seed, 600, temperature=1, seed=seed, logit_bias=FEW)[1] | {
            "stream": True,
            "ignore_eos": True,
        }
        url = drafting.base_url + COMPLETIONS
        with (
            httpx.Client(timeout=120) as client,
            client.stream("POST", url, json=body) as response,
        ):
            lines = response.iter_lines()
            for _ in range(4 + seed % 5):
                next(lines)

    for _ in range(2):
        at_once(leave, range(30, 40))
        assert within(60, lambda: is_empty(drafting))
    same(plain, drafting, [text(8, 60, temperature=1, seed=8, logit_bias=FEW)])


@pytest.mark.parametrize("model", ["tiny-gemma3-q4_k_m", "tiny-step35-q4_k_m", "tiny-qwen3next-q4_k_m"])
def test_across_a_window_and_with_prefixes_twice(model: str) -> None:
    """Rapid-MLX#3605: a draft across the border of a window ends the request. vllm#39273: with recurrent layers,
    drafts by look-up spoil answers behind cached prefixes; sglang#8726: and prompts that are asked again."""
    path = OWN_FIXTURES / f"{model}.gguf"
    prompts = [[30, 31, 32, 33] * count for count in (2, 7, 15, 16, 31)]
    few = {str(token): 100 for token in (30, 31, 32)}
    asked = [
        text(at, 90, prompt=prompt, temperature=at % 2, seed=at, logit_bias=few)
        for at, prompt in enumerate([*prompts, *prompts[:2]])
    ]
    with running_server(path) as plain, drafting_server(path, 4) as drafting:
        for _ in range(2):
            same(plain, drafting, asked)


def test_prefixes_in_scattered_slots(plain: Server, tiny_model: Path) -> None:
    """text-generation-inference#2711: behind a cached prefix, drafts take the slots that follow. Here the pool
    is small, and prefixes of all lengths come and go."""
    flags = "--speculative-config", NGRAM % 4, "--max-total-tokens", "1024", "--max-model-len", "512"
    with always_drafting(tiny_model, *flags) as server:
        for turn in range(3):
            asked = [
                text(
                    at,
                    30 + at,
                    prompt=f"{TEXT * (at % 3)}{turn * at}",
                    temperature=1,
                    seed=at,
                    logit_bias=FEW,
                )
                for at in range(10)
            ]
            same(plain, server, asked)
            assert within(60, lambda: is_empty(server))

"""What users of other servers reported of speculative decoding, most of it since August 2026, asked as in
test_reported_drafts.py. Each test names the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conftest import OWN_FIXTURES
from tests.e2e.completions import TEXT, at_once, is_empty
from tests.e2e.drafts.drafted_answers import (
    ACCEPTED,
    COMPLETIONS,
    FEW,
    NGRAM,
    always_drafting,
    drafting_server,
    same,
)
from tests.e2e.survival.killed_answers import CHAT, FORMAT, PENALTIES, SCHEMA, TOOL, Asked, stream, text
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine("answers are the same bit for bit on the CPU alone")]


@pytest.mark.parametrize("model", ["tiny-qwen3moe-q4_k_m", "tiny-qwen3next-q4_k_m"])
def test_the_next_turn_finds_the_answer_cached(model: str) -> None:
    """llama.cpp#28049: accepted tokens behind the answer's end cost the cache of the whole answer."""
    prompt = [300, 310, 320, 330] * 20
    body = {
        "prompt": prompt,
        "max_tokens": 150,
        "temperature": 1,
        "logit_bias": FEW,
        "return_token_ids": True,
        "stop_token_ids": [320],
        "min_tokens": 60,
        "seed": 3,
    }

    def cached(server: Server) -> tuple[list[int], int]:
        """An answer, and how much of it and its prompt the next turn finds."""
        (first,) = server.post(COMPLETIONS, body, 120.0)["choices"]
        assert within(60, lambda: is_empty(server))  # what is held in flight is cached afterwards
        ids: list[int] = first["token_ids"]
        turn = {"prompt": [*prompt, *ids, *range(400, 420)], "max_tokens": 1}
        usage = server.post(COMPLETIONS, turn, 120.0)["usage"]
        return ids, usage["prompt_tokens_details"]["cached_tokens"]

    path = OWN_FIXTURES / f"{model}.gguf"
    with running_server(path) as server:
        expected = cached(server)
    with drafting_server(path, 4) as server:
        found = cached(server)
        assert server.metrics()[ACCEPTED] > 0
    assert found == expected


def test_every_accepted_token_counts(plain: Server, drafting: Server) -> None:
    """sglang#33643: penalties and min_tokens count one token of a step, however many were accepted."""
    asked = [
        text(1, 70, temperature=1, seed=1, logit_bias=FEW, frequency_penalty=1.9),
        text(2, 70, temperature=1, seed=2, logit_bias=FEW, repetition_penalty=1.4),
        text(3, 90, temperature=1, seed=3, logit_bias=FEW, stop_token_ids=[310], min_tokens=33),
        text(4, 90, temperature=1, seed=4, logit_bias=FEW, stop_token_ids=[300, 310, 320], min_tokens=41),
    ]
    whole = same(plain, drafting, asked)
    assert whole[2]["usage"]["completion_tokens"] >= 33
    assert whole[3]["usage"]["completion_tokens"] == 41 + 1  # any of the three ends it


def test_special_tokens_drafted_in_a_form(plain: Server, drafting: Server) -> None:
    """vllm#46118: drafts of special tokens, which a form never allows, end the request."""
    cut = (
        '{"name":"',
        '{"name":"a","sizes":[',
        '{"name":"a',
        '{"name":"a","sizes":[1,2',
    )  # before <|im_end|>
    messages = [{"role": ("user", "assistant")[i % 2], "content": cut[i % 4]} for i in range(15)]
    body = {"messages": messages, "max_tokens": 150, "response_format": FORMAT}
    how = ({"temperature": 0}, {"temperature": 1, "seed": 4}, {"temperature": 1.5, "seed": 5})
    for whole in same(plain, drafting, [(CHAT, body | each) for each in how], accepted=0):
        (choice,) = whole["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_forms_with_penalties(plain: Server, drafting: Server) -> None:
    """vllm#26586: penalties and a form together end the server."""
    messages = [{"role": "user", "content": TEXT}]
    body = {"messages": messages, "max_tokens": 200, "response_format": FORMAT, "temperature": 1} | PENALTIES
    same(plain, drafting, [(CHAT, body | {"seed": seed}) for seed in range(4)], accepted=0)


def test_a_long_conversation_with_calls(plain: Server, drafting: Server) -> None:
    """vllm#47087 and #35800: after some turns the answers become loops, and calls of tools malformed."""
    messages: list[dict[str, Any]] = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"{turn} {TEXT}"})
        body: dict[str, Any] = {"messages": list(messages), "temperature": 1, "seed": turn, "max_tokens": 60}
        if turn % 2:
            body |= {"tools": [TOOL], "tool_choice": "required"}
        else:
            body |= {"logit_bias": FEW}
        (whole,) = same(plain, drafting, [(CHAT, body)], accepted=0)
        (choice,) = whole["choices"]
        for called in choice["message"].get("tool_calls") or []:
            if choice["finish_reason"] == "tool_calls":
                json.loads(called["function"]["arguments"])
        messages.append({"role": "assistant", "content": choice["message"].get("content") or "Well."})


def test_more_than_once(drafting: Server) -> None:
    """llama.cpp#19231: drafts serve the first request alone."""
    path, body = text(5, 60, temperature=1, seed=5, logit_bias=FEW)
    said = []
    for _ in range(4):
        before = drafting.metrics()[ACCEPTED]
        said.append(stream(drafting, path, body)[0])
        assert drafting.metrics()[ACCEPTED] > before
    assert said == said[:1] * 4


def test_steps_smaller_than_the_drafts(plain: Server, tiny_model: Path) -> None:
    """qvac#4390: a batch of fewer tokens than a draft needs ends the process."""
    asked = [text(i, 50, prompt=[300, 310, 320] * 9, temperature=1, seed=i, logit_bias=FEW) for i in range(3)]
    flags = "--speculative-config", NGRAM % 8, "--max-num-batched-tokens", "4", "--max-num-seqs", "4"
    with always_drafting(tiny_model, *flags) as server:
        same(plain, server, asked, accepted=0)


def test_others_leave_in_the_middle(plain: Server, drafting: Server) -> None:
    """club-3090#758: placeholders of drafts are read as tokens, once requests leave."""
    asked = [text(i, 80, temperature=1, seed=i, logit_bias=FEW) for i in range(4)]
    expected = [stream(plain, *one)[0] for one in asked]

    def leave(i: int) -> None:
        body = text(i, 400, temperature=1, seed=i, logit_bias=FEW)[1] | {"stream": True, "ignore_eos": True}
        with (
            httpx.Client(timeout=120) as client,
            client.stream("POST", drafting.base_url + COMPLETIONS, json=body) as response,
        ):
            lines = response.iter_lines()
            for _ in range(2 + 6 * (i % 4)):
                next(lines)

    def ask(one: int | Asked) -> Any:
        return leave(one) if isinstance(one, int) else stream(drafting, *one)[0]

    assert at_once(ask, [*asked, *range(20, 28)])[: len(asked)] == expected


def test_few_candidates(plain: Server, drafting: Server) -> None:
    """llama.cpp#26648: the sampler looks for a draft among candidates that were cut."""
    cuts: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": 2, "min_p": 0.5},
        {"top_p": 0.05},
        {"typical_p": 0.1},
    ]
    asked = [text(i, 60, temperature=1.5, seed=i, logit_bias=FEW, **cut) for i, cut in enumerate(cuts)]
    same(plain, drafting, asked)


def test_the_end_of_reasoning_is_drafted(plain: Server, drafting: Server) -> None:
    """vllm#42781: reasoning is cut off. Here its end is among the tokens that repeat themselves."""
    ids = {tag: plain.post("/tokenize", {"prompt": tag})["tokens"][0] for tag in ("<think>", "</think>")}
    bias = FEW | {str(ids["</think>"]): 97, str(ids["<think>"]): 97}
    asked = [
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": f"{seed} Well?"}],
                "logit_bias": bias,
                "temperature": 2,
                "seed": seed,
                "max_tokens": 80,
            },
        )
        for seed in range(5)
    ]
    same(plain, drafting, asked, accepted=0)

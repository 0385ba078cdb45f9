"""Reports of speculative decoding in other servers, asked of the demonstration model, which drafts for itself, so that
most drafts are right: of choices, logprobs, samplers, limits, streams that are cancelled, adapters and long repeated
texts. Each test names the report; answers are compared as in test_reported_drafts.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.e2e.completions import at_once, is_empty
from tests.e2e.drafts.drafted_answers import COMPLETIONS, NGRAM, always_drafting, same
from tests.e2e.survival.killed_answers import CHAT, FORMAT, Asked
from tests.support.models.hugging_face_model import read_model, write_model
from tests.support.models.peft_adapters import ATTENTION, write_adapter
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine("answers are the same bit for bit on the CPU alone")]
TOKENS = 48


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with running_server(demonstration_model()) as running:
        yield running


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    model = demonstration_model()
    with always_drafting(model, "--speculative-model", str(model)) as running:
        yield running


def story(prompt: str = "Once upon a time", **how: Any) -> Asked:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0} | how


def test_several_sampled_choices(plain: Server, drafting: Server) -> None:
    """vllm#4934: with n above 1 and sampling, the shapes of drafts do not fit. Nor are the choices alike."""
    (found,) = same(plain, drafting, [story(n=3, temperature=1, seed=4)])
    assert len({choice["text"] for choice in found["choices"]}) == 3


def test_logprobs_with_a_penalty(plain: Server, drafting: Server) -> None:
    """vllm#17876: logprobs of drafted tokens are 0, with a repetition penalty."""
    how: dict[str, Any] = {"repetition_penalty": 1.1, "logprobs": 2, "return_token_ids": True}
    (found,) = same(plain, drafting, [story(**how)])
    logprobs = found["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == len(found["choices"][0]["token_ids"])
    assert sum(logprob < -1e-3 for logprob in logprobs) > TOKENS // 4
    assert all(math.isfinite(logprob) for logprob in logprobs)


def test_the_token_behind_the_drafts_is_sampled(plain: Server, drafting: Server) -> None:
    """ardanlabs/kronk#788: the token behind accepted drafts is the likeliest one, whatever the samplers and the form
    say."""
    asked = [
        story(temperature=1.5, seed=3, top_p=0.9, min_p=0.02),
        story("The little dog", temperature=1, seed=9, top_k=5, typical_p=0.9),
        (CHAT, {"messages": [{"role": "user", "content": "A dog"}], "max_tokens": 90, "temperature": 1.2, "seed": 5,
                "response_format": FORMAT}),
    ]  # fmt: skip
    same(plain, drafting, asked)


def test_samplers_that_look_back(plain: Server, drafting: Server) -> None:
    """mlx-lm#1175: samplers with a memory see the text without the token before the draft."""
    dry: dict[str, Any] = {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 1}
    penalties: dict[str, Any] = {"presence_penalty": 1.2, "frequency_penalty": 0.7}
    same(plain, drafting, [story(**dry), story("The little dog", **penalties)])


def test_no_token_stands_for_a_rejected_draft(plain: Server, drafting: Server) -> None:
    """vllm#54893, antirez/ds4#750: rejected drafts leave token 0, or the begin token, in the answer. Here nearly all
    drafts are wrong, as they do not know the bias."""
    bias = {str(token): 100 for token in (300, 310, 320)}
    how: dict[str, Any] = {"logit_bias": bias, "temperature": 1, "return_token_ids": True, "logprobs": 1}
    found = same(plain, drafting, [story(seed=seed, **how) for seed in range(4)], accepted=0)
    assert {token for one in found for token in one["choices"][0]["token_ids"]} <= {300, 310, 320}


def test_all_tokens_that_were_asked_for(plain: Server, drafting: Server) -> None:
    """ScaleLLM#304: answers end before max_tokens although ignore_eos is set; vllm#26317: and before min_tokens, at
    stop tokens and stop strings."""
    (first,) = same(plain, drafting, [story(return_token_ids=True)])
    token = first["choices"][0]["token_ids"][5]
    asked = [
        story(max_tokens=limit, ignore_eos=True, stop_token_ids=[token], min_tokens=least)
        for limit, least in ((61, 61), (61, 30), (7, 7))
    ]
    found = same(plain, drafting, asked)
    counts = [one["usage"]["completion_tokens"] for one in found]
    assert counts[0] == 61
    assert counts[1] >= 30
    assert counts[2] == 7


def test_cancelled_before_and_within_drafts(plain: Server, drafting: Server) -> None:
    """Blaizzy/mlx-vlm#2206: behind a request that was cancelled before its first token, the cached prefix is one token
    off. Here the same prompts go on, cancelled after any number of events."""
    prompts = [f"Once upon a time there were {number} little dogs. They lived" * 3 for number in range(6)]

    def cancel(number: int) -> None:
        body = story(prompts[number], max_tokens=300, stream=True, ignore_eos=True)[1]
        with (
            httpx.Client(timeout=120) as client,
            client.stream("POST", drafting.base_url + COMPLETIONS, json=body) as response,
        ):
            lines = response.iter_lines()
            for _ in range(number):
                next(lines)

    at_once(cancel, range(len(prompts)))
    assert within(60, lambda: is_empty(drafting))
    same(plain, drafting, [story(f"{prompt} in a house") for prompt in prompts])


def test_texts_that_repeat_themselves(plain: Server, drafting: Server) -> None:
    """vllm-ascend#10321: drafts behind long repeated texts reach beyond the request. All drafts are right there, to
    the last token of the answer."""
    prompt = "the dog and the cat and " * 60
    found = same(plain, drafting, [story(prompt, max_tokens=limit) for limit in (1, 2, 3, 90)])
    assert [one["usage"]["completion_tokens"] for one in found[:3]] == [1, 2, 3]


def test_forms_whose_end_is_drafted(plain: Server, drafting: Server) -> None:
    """vllm#52767: the form takes a token behind its end. Several in turn, and at once, as each ends elsewhere."""
    schema = {"type": "object", "properties": {"a": {"enum": ["dog", "cat"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 60, "response_format": form}
    found = same(plain, drafting, [(CHAT, body | {"temperature": 1, "seed": seed}) for seed in range(6)])
    assert {one["choices"][0]["finish_reason"] for one in found} == {"stop"}


def test_adapters_side_by_side(tmp_path: Path) -> None:
    """vllm#20284, sglang#34337: drafts and adapters together end the server, or mix up adapters of one step."""
    write_model(tmp_path / "model")
    base = read_model(tmp_path / "model")
    for seed, name in enumerate(("first", "second")):
        write_adapter(tmp_path / name, base, seed, r=4, lora_alpha=8, target_modules=ATTENTION)
    modules = [f"{name}={tmp_path / name}" for name in ("first", "second")]
    flags = "--served-model-name", "tiny", "--lora-modules", *modules
    asked = [
        (
            COMPLETIONS,
            {"model": name, "prompt": [300, 310, 320, 330] * 12, "max_tokens": 40, "temperature": 0},
        )
        for name in ("tiny", "first", "second", "first", "tiny")
    ]
    with (
        running_server(tmp_path / "model", *flags) as without,
        always_drafting(tmp_path / "model", *flags, "--speculative-config", NGRAM % 4) as drafts,
    ):
        found = same(without, drafts, asked, accepted=0)
    assert len({one["choices"][0]["text"] for one in found}) == 3

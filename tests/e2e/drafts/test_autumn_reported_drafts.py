"""Reports of speculative decoding in other servers of July to September 2026, and older ones that they refer to, asked
as in test_reported_drafts.py: of Mamba-2 layers and short convolutions, quantised keys and values, small models beside
the large one, requests that lose their memory, and what answers say about drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.conftest import OWN_FIXTURES
from tests.e2e.completions import TEXT, at_once
from tests.e2e.drafts.drafted_answers import (
    ACCEPTED,
    COMPLETIONS,
    DRAFTED,
    NGRAM,
    always_drafting,
    drafting_server,
    same,
)
from tests.e2e.survival.killed_answers import Asked, call, schema, text
from tests.support.models.changed_header import with_number
from tests.support.servers.server import Server, running_server, stream_events
from tests.support.servers.waiting import within

pytestmark = [pytest.mark.slow, pytest.mark.cpu_engine("answers are the same bit for bit on the CPU alone")]
BIASED = {str(token): 100 for token in (30, 31, 32)}
PREEMPTED = "vllm:num_preemptions_total"


def story(prompt: str = "Once upon a time", **how: Any) -> Asked:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 48, "temperature": 0} | how


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """The demonstration model, which drafts for itself."""
    model = demonstration_model()
    with always_drafting(model, "--speculative-model", str(model)) as running:
        yield running


@pytest.mark.parametrize("name", ["nemotronhmoe-f16", "falconh1-f16", "granitehybrid-f16", "lfm2moe-f16"])
def test_states_of_other_recurrences(name: str) -> None:
    """vllm#39273 (of 20 July): look-up drops tokens of Nemotron 3's answers. vllm#52942: a step without drafts reads
    the state from before the accepted ones of the last step. vllm#57721: such models do not start with drafts.
    buun-llama-cpp#74: look-up that finds nothing ends the server. Here some requests repeat themselves and others do
    not, so that steps with and without drafts follow each other."""
    path = OWN_FIXTURES / f"tiny-{name}.gguf"
    asked = [
        *(
            text(
                at, 70, prompt=[30, 31, 32, 33] * (3 + 9 * at), logit_bias=BIASED, temperature=at % 2, seed=at
            )
            for at in range(4)
        ),
        *(text(at, 40, prompt=[40 + at, 60, 61] * 5, temperature=1, seed=at, logprobs=2) for at in range(3)),
    ]
    with running_server(path) as plain, drafting_server(path, 4) as drafting:
        for _ in range(2):
            same(plain, drafting, asked, accepted=20)


@pytest.mark.parametrize("drafts", ["look-up", "small model"])
def test_quantised_keys_and_values(drafts: str) -> None:
    """vllm#40831: with quantised keys and values, drafts of any kind end in loops."""
    model, quantised = demonstration_model(), ("--kv-cache-dtype", "q8_0")
    how = ("--speculative-config", NGRAM % 3) if drafts == "look-up" else ("--speculative-model", str(model))
    asked = [
        story("The little dog and the little dog and the little dog", ignore_eos=True),
        story(temperature=0.8, seed=3, ignore_eos=True),
        schema(temperature=1, seed=3),
        call(80, temperature=0),
    ]
    with running_server(model, *quantised) as plain, always_drafting(model, *quantised, *how) as drafting:
        same(plain, drafting, asked, accepted=8)


def test_a_small_model_with_a_shorter_context(tmp_path: Path) -> None:
    """llama.cpp#22554, vllm#24662: behind the end of the small model's context the server ends; ik_llama.cpp#732: it is
    slower than without."""
    model = demonstration_model()
    small = with_number(model, tmp_path / "small.gguf", "context_length", 64)
    asked = [story(ignore_eos=True, max_tokens=120), story("A cat", ignore_eos=True, max_tokens=30)]
    with (
        running_server(model) as plain,
        always_drafting(model, "--speculative-model", str(small)) as drafting,
    ):
        same(plain, drafting, asked, accepted=20)


def has_accepted(server: Server, more_than: float) -> bool:
    return server.metrics()[ACCEPTED] > more_than


def test_one_long_text_after_another(own: Server) -> None:
    """llama.cpp#27692: the small model's keys are not given back, so that after some requests nothing is drafted;
    #26478: nor behind some number of tokens."""
    for turn in range(6):
        before = own.metrics()[ACCEPTED]
        own.post(*story(f"{turn} {TEXT * 20}", ignore_eos=True))
        assert within(30, partial(has_accepted, own, before + 10)), turn


@pytest.mark.parametrize("name", ["qwen3next-q4_k_m", "nemotronhmoe-f16"])
def test_requests_that_lose_their_memory(name: str) -> None:
    """vllm#49620, #41190: the late result of a step with drafts is taken for a request that had to begin again."""
    path = OWN_FIXTURES / f"tiny-{name}.gguf"
    asked = [
        text(at, 90, prompt=[30 + at % 2, 31, 32, 33] * 9, logit_bias=BIASED, temperature=at % 2, seed=at)
        for at in range(8)
    ]
    small = "--max-total-tokens", "512", "--max-model-len", "256", "--max-num-seqs", "8"
    flags = *small, "--speculative-config", NGRAM % 4
    with running_server(path) as plain, always_drafting(path, *flags) as drafting:
        for _ in range(2):
            same(plain, drafting, asked)
        assert drafting.metrics()[PREEMPTED] > 0


def test_each_answer_says_what_was_drafted(own: Server) -> None:
    """Blaizzy/mlx-vlm#1788, vllm-ascend#15750: figures of drafts are missing in answers, or in streams. Those of all
    answers together are the server's."""
    counts = own.metrics()
    body = {"prompt": "The little dog", "n_predict": 40, "temperature": 0, "ignore_eos": True}

    def streamed(number: int) -> dict[str, Any]:
        with (
            httpx.Client(timeout=120) as client,
            client.stream(
                "POST", own.base_url + "/completion", json=body | {"stream": True, "seed": number}
            ) as answer,
        ):
            timings: dict[str, Any] = list(stream_events(answer))[-1]["timings"]
            return timings

    timings = [*at_once(streamed, range(4)), own.post("/completion", body)["timings"]]
    chat = own.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "A dog"}], "max_tokens": 40}
    )
    drafted = sum(one["draft_n"] for one in timings) + chat["timings"]["draft_tokens"]
    accepted = sum(one["draft_n_accepted"] for one in timings) + chat["timings"]["accepted_draft_tokens"]
    assert accepted > 40
    assert within(30, lambda: own.metrics()[ACCEPTED] == counts[ACCEPTED] + accepted)
    assert own.metrics()[DRAFTED] == counts[DRAFTED] + drafted

"""Drafts on a GPU: greedy texts are those without drafts up to the first step whose choice is not clear, of models that
attend, that have a pool of windows, and latent attention, with all experts on the GPU and half of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeserve.kernels.launch import first_launches
from moeserve.messages.sampling import TokenLogprob
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.runner import Runner
from tests.gpu.fixture_parity import load_fixture, model_of
from tests.gpu.runners import runner_of
from tests.support.foreseen_drafts import ANSWER, Foreseen, asked, whole_texts
from tests.support.launched_ahead import LaunchedAhead
from tests.support.served_answers import Answer, serve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MOST = 4
MARGIN = 0.1  # between the two likeliest tokens, in nats
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'
PLACED = [
    ("tiny-qwen3moe-q4_k_m", 8),
    ("tiny-qwen3moe-q4_k_m", 4),
    ("families/tiny-gptoss-mxfp4", 8),
    ("families/tiny-deepseek2-q4_k_m", 4),
]


@pytest.fixture(
    scope="module", params=PLACED, ids=lambda placed: f"{placed[0].rpartition('/')[2]}-{placed[1]}"
)
def runner(request: pytest.FixtureRequest) -> Runner:
    name, experts = request.param
    return runner_of(model_of(load_fixture(name)), num_gpu_experts=experts, speculative_config=NGRAM)


@pytest.mark.parametrize("streams", [1, 16])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"presence_penalty": 0.5, "repetition_penalty": 1.2}],
    ids=["greedy", "penalties"],
)
def test_same_texts(runner: Runner, streams: int, sampling: dict[str, Any]) -> None:
    requests = asked(streams, runner.ready().vocab_size, **sampling)
    expected, before = serve(runner, requests, 0)
    foresee(runner, whole_texts(requests, expected))
    launched = first_launches()
    found, report = serve(runner, requests, MOST)
    clear = [clear_length(answer) for answer in expected.values()]
    for length, id in zip(clear, expected, strict=True):
        assert found[id].tokens[:length] == expected[id].tokens[:length]
    same = sum(found[id].tokens == expected[id].tokens for id in expected)
    print(
        f"DRAFTS {streams} streams: {same} texts equal, {sum(clear)} clear tokens; {report.accepted_draft_tokens} of "
        f"{report.draft_tokens} drafts right; {report.steps} steps, {before.steps} without"
    )
    assert first_launches() == launched  # all was compiled before the first request
    if same == streams:  # drafts behind a text's first difference are all wrong
        assert report.accepted_draft_tokens > ANSWER * streams / 3
    assert report.accepted_draft_tokens > 0
    assert report.steps < before.steps


def test_drawn_texts(runner: Runner) -> None:
    """The noise of each position is that without drafts: texts are the same as long as no draw is near a border."""
    requests = asked(16, runner.ready().vocab_size, temperature=1.0)
    expected, _ = serve(runner, requests, 0)
    foresee(runner, whole_texts(requests, expected))
    found, report = serve(runner, requests, MOST)
    agreed = [agreed_length(found[id].tokens, answer.tokens) for id, answer in expected.items()]
    print(
        f"DRAFTS drawn: {sum(agreed)} of {16 * ANSWER} tokens agree; {report.accepted_draft_tokens} drafts right"
    )
    assert sum(agreed) > 16 * ANSWER / 4


def test_launched_ahead_while_nothing_is_drafted(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that might have had drafts begin where the step before, whose tokens are still to come, ends."""
    requests = asked(4, runner.ready().vocab_size, logprobs=None)
    expected, _ = serve(runner, requests, 0)
    monkeypatch.setattr(DraftLength, "choose", lambda self, records, *_: ([0] * len(records), 0.0))
    worker = LaunchedAhead(runner)
    found, _ = serve(worker, requests, MOST, lambda world, _: setattr(worker, "world", world))  # type: ignore[arg-type]
    assert worker.num_ahead > ANSWER / 2
    assert {id: answer.tokens for id, answer in found.items()} == {
        id: answer.tokens for id, answer in expected.items()
    }


def test_graphs_of_steps_with_drafts(runner: Runner) -> None:
    """16 requests with 4 drafts each have one."""
    engine = runner.engine
    assert isinstance(engine, GpuEngine)
    assert engine.facts.max_drafts_size == 128


def foresee(runner: Runner, texts: list[list[int]]) -> None:
    rows = runner._drafts
    assert rows is not None
    rows._drafter = Foreseen(rows._sequences.tokens, texts, 0.8)


def clear_length(answer: Answer) -> int:
    """Tokens before the first whose margin is small."""
    for at, entry in enumerate(answer.logprobs):
        assert isinstance(entry, TokenLogprob)
        if entry.top_logprobs[0] - entry.top_logprobs[1] < MARGIN:
            return at
    return len(answer.tokens)


def agreed_length(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))

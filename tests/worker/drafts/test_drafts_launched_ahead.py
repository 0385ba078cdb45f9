"""Steps with drafts whose next plan is there: it is launched when their tokens are known, before their result is told.

On a CPU engine that plays a GPU's part; on a GPU the same is in `tests/gpu/test_drafts.py`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from tests.conftest import OWN_FIXTURES
from tests.support.worker.foreseen_drafts import ANSWER, Foreseen, asked, whole_texts
from tests.support.worker.launched_ahead import LaunchedAhead, play_gpu
from tests.support.worker.served_answers import Told, load, lose_at, serve

MOST = 3
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'


# One that attends, one with recurrent states, and one with a pool of windows.
@pytest.fixture(
    scope="module", params=["tiny-qwen3moe-q4_k_m", "tiny-qwen3next-q4_k_m", "tiny-gemma3-q4_k_m"]
)
def runner(request: pytest.FixtureRequest) -> Runner:
    return build_cpu_runner(load(OWN_FIXTURES / f"{request.param}.gguf", speculative_config=NGRAM))


@pytest.mark.parametrize(
    ("streams", "sampling"),
    [(5, {"temperature": 0.7}), (1, {"temperature": 0.0, "presence_penalty": 0.5})],
    ids=["drawn", "with penalties"],
)
def test_same_answers(
    runner: Runner, streams: int, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with and without drafts follow each other in any order; a worker is lost with a step launched ahead."""
    requests = asked(streams, runner.ready().vocab_size, **sampling)
    expected, _ = serve(runner, requests, 0)
    rng = random.Random(5)
    monkeypatch.setattr(
        DraftLength,
        "choose",
        lambda self, records, *_: ([rng.choice((0, 0, MOST)) for _ in records], float(MOST)),
    )
    assert runner._drafts is not None
    foreseen = Foreseen(runner._sequences.tokens, whole_texts(requests, expected), 0.8)
    monkeypatch.setattr(runner._drafts, "_drafter", foreseen)
    play_gpu(runner, monkeypatch)
    worker, lose = LaunchedAhead(runner), lose_at(9)

    def during(world: Told, number: int) -> None:
        worker.world = world
        if number == 9:
            worker.forget()
        lose(world, number)

    found, report = serve(worker, requests, MOST, during)  # type: ignore[arg-type]
    assert found == expected
    assert report.engine_losses == 1
    assert report.accepted_draft_tokens > ANSWER / 8
    assert worker.num_with_drafts > ANSWER / 8
    assert worker.num_ahead > worker.num_with_drafts

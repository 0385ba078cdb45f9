"""Prompts with pictures on a real worker of Gemma 4, whose pictures' rows see one another in windowed layers, against
transformers' float32 logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.router.core.policy.preemption import PREEMPTIBLE
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from tests.support.pictures.picture_fixture import GEMMA_MODEL, PICTURES, gemma_picture_cases
from tests.support.pictures.picture_steps import asked, kl, logits
from tests.support.worker.served_answers import Told, load, serve

CASES = [gemma_picture_cases()[name] for name in PICTURES]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingFiles:
    return EmbeddingFiles(tmp_path_factory.mktemp("pictures") / "spans")


@pytest.fixture(scope="module", params=[None, 0.2], ids=["one pool", "windows apart"])
def runner(files: EmbeddingFiles, request: pytest.FixtureRequest) -> Runner:
    options = {} if request.param is None else {"kv_window_ratio": request.param}
    return build_cpu_runner(load(GEMMA_MODEL, **options), files)


@pytest.mark.parametrize("name", PICTURES)
def test_logits(runner: Runner, files: EmbeddingFiles, name: str) -> None:
    """With the true embeddings. llama.cpp's own distance behind the picture, with its own, is 3e-4 to 8e-4; a causal
    picture would cost 0.3 to 0.4."""
    case = gemma_picture_cases()[name]
    (found,) = logits(runner, files, [case], 256)
    text = ~np.array(case.is_picture)
    assert kl(case.truth["logits"][text], found[text]) < 2e-5
    behind = np.arange(len(text)) >= case.end
    assert kl(case.truth["logits"][behind], found[behind]) < 2e-5
    assert kl(case.truth["logits"][~text], found[~text]) < 2e-5


def test_chunks_and_crowds(runner: Runner, files: EmbeddingFiles) -> None:
    """Borders around pictures, and other prompts in the step, change no bit."""
    alone = [logits(runner, files, [case], 256)[0] for case in CASES]
    for chunk in (256, 7, 33):
        for expected, found in zip(alone, logits(runner, files, CASES, chunk, whole=True), strict=True):
            assert np.array_equal(expected, found)


def test_a_step_that_cuts_a_picture(runner: Runner, files: EmbeddingFiles) -> None:
    with pytest.raises(ValueError, match="before the end of a span that is computed whole"):
        logits(runner, files, CASES[:1], 33)


@pytest.mark.parametrize(
    "limits",
    [{"max_num_batched_tokens": 66}, {"max_num_batched_tokens": 80, "reuse_prefixes": False}],
    ids=str,
)
def test_through_the_scheduler(runner: Runner, files: EmbeddingFiles, limits: dict[str, Any]) -> None:
    """Cut beside pictures, preempted and computed again or found in the cache: answers are the same, bit for bit."""
    ready = runner.ready()
    assert ready.whole_spans
    limits |= {"embedding_bytes": 4 * ready.embedding_size, "whole_spans": True}

    def preempt(world: Told, number: int) -> None:
        if number in (2, 5, 9):
            batch = world.scheduler._batch
            for one in [one for one in batch.running.values() if one.state in PREEMPTIBLE]:
                batch.preempt(one)

    requests = [asked(files, id, case) for id, case in enumerate(CASES)]
    expected = [
        serve(runner, [one], 0, **limits | {"max_num_batched_tokens": 256})[0][id]
        for id, one in enumerate(requests)
    ]
    found, report = serve(runner, requests, 0, preempt, **limits)
    assert [found[id] for id in range(len(CASES))] == expected
    assert report.preemptions > 0


def test_a_second_turn(runner: Runner, files: EmbeddingFiles) -> None:
    """The first turn's picture is found in the cache, also by a prompt that departs from the first one behind it; their
    answers have the bits that they have alone."""
    ready = runner.ready()
    limits: dict[str, Any] = {"embedding_bytes": 4 * ready.embedding_size, "whole_spans": True}
    first = asked(files, 0, CASES[0])
    tokens = np.frombuffer(first.token_ids, np.int32)
    again = replace(first, id=1, token_ids=np.append(tokens, np.arange(100, 140, dtype=np.int32)).tobytes())
    other = replace(first, id=2, token_ids=np.append(tokens[: CASES[0].end + 3], tokens[:30]).tobytes())
    alone = [serve(runner, [one], 0, **limits)[0][one.id] for one in (first, again, other)]

    def then(world: Told, number: int) -> None:
        if number == 4:
            world.add(again)
            world.add(other)

    found, report = serve(runner, [first], 0, then, **limits)
    assert [found[id] for id in range(3)] == alone
    assert report.cached_tokens >= len(tokens) + CASES[0].end

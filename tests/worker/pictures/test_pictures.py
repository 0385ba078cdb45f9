"""Prompts with pictures on a real worker: positions in three sections, against transformers' float32 logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.router.core.policy.preemption import PREEMPTIBLE
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from tests.support.pictures.picture_fixture import MODEL, PICTURES, picture_cases
from tests.support.pictures.picture_steps import asked, kl, logits
from tests.support.worker.served_answers import Told, load, serve

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingFiles:
    return EmbeddingFiles(tmp_path_factory.mktemp("pictures") / "spans")


@pytest.fixture(scope="module")
def runner(files: EmbeddingFiles) -> Runner:
    return build_cpu_runner(load(MODEL), files)


@pytest.mark.parametrize("name", PICTURES)
def test_logits(runner: Runner, files: EmbeddingFiles, name: str) -> None:
    """With the true embeddings; llama.cpp's own distance with its own is 2e-6 to 4e-6, where pictures have the same
    size."""
    case = picture_cases()[name]
    (found,) = logits(runner, files, [case], 256)
    text = ~np.array(case.is_picture)
    assert kl(case.truth["logits"][text], found[text]) < 4e-6


def test_chunks_and_crowds(runner: Runner, files: EmbeddingFiles) -> None:
    """Borders inside pictures, and other prompts in the step, change no bit."""
    cases = [picture_cases()[name] for name in PICTURES]
    alone = [logits(runner, files, [case], 256)[0] for case in cases]
    for chunk in (256, 7, 16):
        for expected, found in zip(alone, logits(runner, files, cases, chunk), strict=True):
            assert np.array_equal(expected, found)


@pytest.mark.parametrize(
    "limits", [{"max_num_batched_tokens": 16}, {"reuse_prefixes": False}, {"drafts": 4}], ids=str
)
def test_through_the_scheduler(files: EmbeddingFiles, limits: dict[str, Any]) -> None:
    """Cut, preempted and computed again or found in the cache, or drafted: answers are the same, bit for bit."""
    drafts = limits.get("drafts", 0)
    model = load(MODEL, speculative_config=NGRAM) if drafts else load(MODEL)
    runner = build_cpu_runner(model, files)
    ready = runner.ready()
    limits = {name: value for name, value in limits.items() if name != "drafts"}
    limits |= {"embedding_bytes": 4 * ready.embedding_size, "rotates_in_sections": ready.rotates_in_sections}
    cases = [picture_cases()[name] for name in PICTURES]

    def preempt(world: Told, number: int) -> None:
        if number in (2, 5, 9):
            batch = world.scheduler._batch
            for one in [one for one in batch.running.values() if one.state in PREEMPTIBLE]:
                batch.preempt(one)

    expected = [
        serve(runner, [asked(files, id, case)], 0, **limits | {"max_num_batched_tokens": 256})[0][id]
        for id, case in enumerate(cases)
    ]
    found, report = serve(
        runner, [asked(files, id, case) for id, case in enumerate(cases)], drafts, preempt, **limits
    )
    assert [found[id] for id in range(len(cases))] == expected
    assert report.preemptions > 0

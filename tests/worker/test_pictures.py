"""Prompts with pictures on a real worker: positions in three sections, against transformers' float32 logits."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import GenerateRequest
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.router.core.policy.preemption import PREEMPTIBLE
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from tests.support.accuracy import log_softmax
from tests.support.picture_fixture import MODEL, PICTURES, PictureCase, picture_cases
from tests.support.router_world import request
from tests.support.served_answers import Told, load, serve

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}'
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingFiles:
    return EmbeddingFiles(tmp_path_factory.mktemp("pictures") / "spans")


@pytest.fixture(scope="module")
def runner(files: EmbeddingFiles) -> Runner:
    return build_cpu_runner(load(MODEL), files)


def logits(runner: Runner, files: EmbeddingFiles, cases: list[PictureCase], chunk: int) -> list[np.ndarray]:
    """The logits of each prompt, [tokens, vocab]: all side by side, in steps of up to `chunk` tokens of each."""
    engine = runner.engine
    assert isinstance(engine, CpuEngine)
    found: list[list[np.ndarray]] = [[] for _ in cases]
    for at in range(0, max(len(case.tokens) for case in cases), chunk):
        begins = at == 0
        rows, owners = [], []
        for slot, case in enumerate(cases):
            count = min(chunk, len(case.tokens) - at)
            if count > 0:
                kv = np.arange(at, at + count, dtype=np.int32) + 1000 * slot
                rows.append(Row(slot, at, count, kv.tobytes(), False))
                owners += [slot] * count
        bound = [seq_of(files, slot, case) for slot, case in enumerate(cases)] if begins else []
        zeroed = (
            np.array([[-1, slot] for slot in range(len(cases))], np.int32) if begins else np.zeros((0, 2))
        )
        runner.step(
            StepPlan(step=at, rows=rows, new_seqs=bound, state_copies=zeroed.astype(np.int32).tobytes())
        )
        for first in range(0, len(owners), 8):
            part = np.arange(first, min(first + 8, len(owners)), dtype=np.int32)
            for slot, row in zip(owners[first : first + 8], engine.logits_of(part).numpy(), strict=True):
                found[slot].append(row.copy())
    return [np.stack(rows) for rows in found]


def seq_of(files: EmbeddingFiles, slot: int, case: PictureCase) -> NewSeq:
    rows = case.truth["embeddings"].astype(np.float32).tobytes()
    tokens = np.array(case.tokens, np.int32)
    tokens[case.start : case.start + case.num_tokens] = -2
    span = EmbeddingSpan(
        case.start, case.num_tokens, sha256(rows).digest(), files.write(rows), case.positions
    )
    return NewSeq(slot, tokens.tobytes(), len(tokens), b"", GREEDY, state_slot=slot, spans=[span])


def kl(truth: np.ndarray, found: np.ndarray) -> float:
    p, q = log_softmax(truth), log_softmax(found)
    return float(np.median(np.sum(np.exp(p) * (p - q), axis=-1)))


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


def asked(files: EmbeddingFiles, id: int, case: PictureCase) -> GenerateRequest:
    seq = seq_of(files, 0, case)
    tokens = np.maximum(np.frombuffer(seq.token_ids, np.int32), 3)
    message = request(id, tokens.tolist(), 12)
    sampling = SamplingParams(max_tokens=12, temperature=0.7, seed=id, logprobs=2)
    return replace(message, sampling=sampling, spans=seq.spans)


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

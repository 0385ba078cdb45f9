"""Prompts with pictures on a real worker: positions in three sections, against transformers' float32 logits."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from tests.support.accuracy import log_softmax
from tests.support.picture_fixture import MODEL, PICTURES, PictureCase, picture_cases
from tests.support.served_answers import load

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingFiles:
    return EmbeddingFiles(tmp_path_factory.mktemp("pictures") / "spans")


@pytest.fixture(scope="module")
def runner(files: EmbeddingFiles) -> Runner:
    return build_cpu_runner(load(MODEL), files)


def logits(runner: Runner, files: EmbeddingFiles, cases: list[PictureCase], chunk: int) -> list[np.ndarray]:
    """Of each prompt, [tokens, vocab]: all prompts side by side, in steps of up to `chunk` tokens of each."""
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

"""Prompts with pictures on a real worker, with transformers' embeddings."""

from __future__ import annotations

from hashlib import sha256
from typing import cast

import numpy as np
from msgspec.structs import replace

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import GenerateRequest
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.drafts.run_sampler import DraftingEngine
from moeserve.worker.runner import Runner
from tests.support.measuring.accuracy import log_softmax
from tests.support.pictures.picture_fixture import PictureCase
from tests.support.router.router_world import request

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def logits(
    runner: Runner, files: EmbeddingFiles, cases: list[PictureCase], chunk: int, *, whole: bool = False
) -> list[np.ndarray]:
    """The logits of each prompt, [tokens, vocab]: all side by side, in steps of up to `chunk` tokens of each. whole: no
    step ends within a picture."""
    engine = cast(DraftingEngine, runner.engine)
    found: list[list[np.ndarray]] = [[] for _ in cases]
    new = [seq_of(files, slot, case) for slot, case in enumerate(cases)]
    zeroed = np.array([[-1, slot] for slot in range(len(cases))], np.int32)
    copies = zeroed.tobytes() if runner.ready().num_state_slots else b""
    while any(len(rows) < len(case.tokens) for rows, case in zip(found, cases, strict=True)):
        rows, owners = [], []
        for slot, case in enumerate(cases):
            at = len(found[slot])
            count = _chunk(case, at, chunk, whole=whole)
            if count > 0:
                kv = (np.arange(at, at + count, dtype=np.int32) + 200 * slot).tobytes()
                windows = kv if runner.ready().num_window_slots else b""
                rows.append(Row(slot, at, count, kv, False, windows))
                owners += [slot] * count
        runner.step(StepPlan(step=len(found[0]), rows=rows, new_seqs=new, state_copies=copies))
        new, copies = [], b""
        for first in range(0, len(owners), 8):
            part = np.arange(first, min(first + 8, len(owners)), dtype=np.int32)
            for slot, row in zip(
                owners[first : first + 8], engine.logits_of(part).cpu().numpy(), strict=True
            ):
                found[slot].append(row.copy())
    return [np.stack(rows) for rows in found]


def _chunk(case: PictureCase, at: int, chunk: int, *, whole: bool) -> int:
    end = min(at + chunk, len(case.tokens))
    if whole and case.start < end < case.end:
        end = case.start if at < case.start else case.end
    return end - at


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


def asked(files: EmbeddingFiles, id: int, case: PictureCase) -> GenerateRequest:
    seq = seq_of(files, 0, case)
    tokens = np.maximum(np.frombuffer(seq.token_ids, np.int32), 3)
    message = request(id, tokens.tolist(), 12)
    sampling = SamplingParams(max_tokens=12, temperature=0.7, seed=id, logprobs=2)
    return replace(message, sampling=sampling, spans=seq.spans)

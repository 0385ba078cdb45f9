"""The logits of one prompt with a picture on a real worker, and its distance from another's."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.runner import Runner
from tests.support.measuring.accuracy import log_softmax
from tests.support.pictures.picture_steps import GREEDY


def span_of(files: EmbeddingFiles, start: int, rows: np.ndarray, positions: bytes = b"") -> EmbeddingSpan:
    """A picture's embeddings at `start`, in a file."""
    data = rows.tobytes()
    return EmbeddingSpan(start, len(rows), sha256(data).digest(), files.write(data), positions)


def positions_in_sections(first: int, rows: int, columns: int) -> bytes:
    """`EmbeddingSpan.positions` of a picture of rows x columns tokens whose first has the position `first`."""
    positions = array("i", [first]) * (rows * columns)
    positions.extend(first + row for row in range(rows) for _ in range(columns))
    positions.extend([*range(first, first + columns)] * rows)
    return positions.tobytes()


def span_logits(runner: Runner, tokens: Sequence[int], spans: list[EmbeddingSpan], chunk: int) -> np.ndarray:
    """The logits of every position, in steps of up to `chunk`."""
    ids = np.array(tokens, np.int32)
    for span in spans:
        ids[span.start : span.end] = -2
    new = [NewSeq(0, ids.tobytes(), len(ids), b"", GREEDY, spans=spans)]
    engine, found = runner.engine, []
    assert isinstance(engine, CpuEngine)
    for at in range(0, len(ids), chunk):
        count = min(chunk, len(ids) - at)
        slots = np.arange(at, at + count, dtype=np.int32).tobytes()
        windows = slots if runner.ready().num_window_slots else b""
        runner.step(StepPlan(step=at, rows=[Row(0, at, count, slots, False, windows)], new_seqs=new))
        new = []
        for first in range(0, count, 8):
            part = np.arange(first, min(first + 8, count), dtype=np.int32)
            found.append(engine.logits_of(part).numpy().copy())
    return np.concatenate(found)


def distance(truth: np.ndarray, found: np.ndarray) -> float:
    """The largest KL of all positions."""
    p, q = log_softmax(truth), log_softmax(found[:, : truth.shape[1]])
    return float(np.sum(np.exp(p) * (p - q), axis=-1).max())

"""Behind a picture a next-token block drafts from the positions of the model itself, not from the tokens' numbers."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.models.blocks.cpu import next_token
from moeserve.models.blocks.cpu.next_token import CpuNextTokenBlock, NextTokenRows
from moeserve.models.blocks.cpu.workspace import CpuBatch
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.engines.request_embeddings import EmbeddedStep, RequestEmbeddings
from moeserve.worker.loading import drafting
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.sequences import StepLayout
from tests.support.models.next_token_folder import NextTokenFolder
from tests.support.pictures.span_steps import positions_in_sections
from tests.support.worker.foreseen_drafts import ANSWER, asked
from tests.support.worker.served_answers import load, serve

START, HEIGHT, WIDTH = 10, 3, 4
PICTURE = HEIGHT * WIDTH  # tokens, which take only WIDTH positions


def by_section(positions: Any, row: int) -> tuple[int, ...]:
    column = np.asarray(positions)[..., row]
    return tuple(np.broadcast_to(column, 3).tolist())


class Seen:
    """RoPE positions of the model's tokens and of the block's rows, by request slot and number of the token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model: dict[tuple[int, int], tuple[int, ...]] = {}
        # KV slot and number q of a token, positions of its row
        self.block: list[tuple[tuple[int, int], tuple[int, ...]]] = []
        self.request_of: dict[tuple[int, int], int] = {}  # KV slot and number of a token: request slot
        of_step, batch_of = RequestEmbeddings.of_step, next_token._batch_of

        def noted_step(embeddings: RequestEmbeddings, layout: StepLayout) -> EmbeddedStep:
            step = of_step(embeddings, layout)
            for row, token in enumerate(zip(layout.sequence.tolist(), layout.position.tolist(), strict=True)):
                self.model[token] = by_section(step.rotary_positions, row)
                self.request_of[int(layout.kv_slots[row]), token[1]] = token[0]
            return step

        def noted_batch(rows: NextTokenRows) -> CpuBatch:
            batch, numbers = batch_of(rows), (rows.positions + 1).tolist()
            for i, token in enumerate(zip(rows.kv_slots.tolist(), numbers, strict=True)):
                self.block.append((token, by_section(batch.positions, i)))
            return batch

        self.early: list[bool] = []  # of each step, whether its states were read before they were computed
        model_rows = CpuNextTokenBlock.model_rows

        def noted_rows(block: CpuNextTokenBlock, n: int) -> torch.Tensor:
            found = model_rows(block, n)
            block.wait()
            self.early.append(not torch.equal(found, model_rows(block, n)))
            return found

        monkeypatch.setattr(CpuNextTokenBlock, "model_rows", noted_rows)
        monkeypatch.setattr(RequestEmbeddings, "of_step", noted_step)
        monkeypatch.setattr(next_token, "_batch_of", noted_batch)


def test_its_positions_are_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows within the picture, behind it, and drafts, beside a request without pictures. A prompt's chunk, for whose
    tokens nobody waits, has ended before the block reads its states."""
    monkeypatch.setattr(drafting, "least_probability", lambda _config: 0.0)
    folder, files = NextTokenFolder(tmp_path, "qwen3_5_moe_text"), EmbeddingFiles(tmp_path / "spans")
    model = load(folder.path, speculative_config='{"method": "mtp", "num_speculative_tokens": 3}')
    assert model.shape.rope_sections is not None
    runner = build_cpu_runner(model, files)
    size = 4 * runner.ready().embedding_size
    requests = asked(2, runner.ready().vocab_size)
    rows = np.random.default_rng(5).normal(size=(PICTURE, size // 4)).astype(np.float32)
    span = EmbeddingSpan(
        START,
        PICTURE,
        sha256(rows.tobytes()).digest(),
        files.write(rows.tobytes()),
        positions_in_sections(START, HEIGHT, WIDTH),
    )
    ids = np.frombuffer(requests[0].token_ids, np.int32).copy()
    ids[START : START + PICTURE] = 3
    requests[0] = msgspec.structs.replace(requests[0], token_ids=ids.tobytes(), spans=[span])
    limits: dict[str, Any] = {
        "embedding_bytes": size,
        "rotates_in_sections": True,
        "reuse_prefixes": False,
        "max_num_batched_tokens": 17,
    }
    expected, _ = serve(runner, requests, 0, **limits)
    seen = Seen(monkeypatch)
    found, report = serve(runner, requests, 3, **limits)
    assert found == expected
    assert report.draft_tokens > ANSWER
    compared = {"text": 0, "within": 0, "behind": 0}
    for (kv_slot, number), positions in seen.block:
        request = seen.request_of.get((kv_slot, number))
        if request is None:  # the end of a chain, which no step verified
            continue
        assert positions == seen.model[request, number - 1]
        kind = "text" if len(set(positions)) == 1 else "within"
        compared["behind" if positions[0] < number - 1 and kind == "text" else kind] += 1
    assert not any(seen.early)
    assert compared["within"] > PICTURE // 2
    assert min(compared.values()) > 0
    assert compared["behind"] > ANSWER

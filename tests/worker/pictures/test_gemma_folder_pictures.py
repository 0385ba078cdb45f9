"""Gemma 4 with experts, as it is published with vision, from a folder: its pictures beside transformers' model."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.support.measuring.accuracy import log_softmax
from tests.support.models.hugging_face_model import write_published_gemma
from tests.support.models.hugging_face_settings import VOCAB_ROWS
from tests.support.pictures.picture_steps import GREEDY
from tests.support.worker.served_answers import load

START, COUNT, LENGTH = 5, 20, 34


@pytest.mark.parametrize("setting", ["vision", None])
def test_a_picture_in_a_folder_s_model(setting: str | None, tmp_path: Path) -> None:
    """It sees itself whole where the configuration says so, and nothing behind itself elsewhere."""
    folder = tmp_path / "tiny"
    model_class = write_published_gemma(folder, torch.float32)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = setting
    (folder / "config.json").write_text(json.dumps(config))
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    for token, name in enumerate(("image", "video", "audio"), 1):  # which the prompt has not
        setattr(model.config, f"{name}_token_id", token)
    rng = np.random.default_rng(3)
    tokens = rng.integers(4, VOCAB_ROWS, LENGTH).astype(np.int32)
    rows = rng.normal(0, 1, (COUNT, model.config.text_config.hidden_size)).astype(np.float32)
    kinds = torch.zeros(1, LENGTH, dtype=torch.long)
    kinds[0, START : START + COUNT] = 1
    with torch.no_grad():
        inputs = model.get_input_embeddings()(torch.from_numpy(tokens).long()[None])
        inputs[0, START : START + COUNT] = torch.from_numpy(rows)
        truth = model(inputs_embeds=inputs, mm_token_type_ids=kinds).logits[0].numpy()

    files = EmbeddingFiles(tmp_path / "spans")
    runner = build_cpu_runner(load(folder), files)
    assert runner.ready().whole_spans == (setting == "vision")
    data = rows.tobytes()
    tokens[START : START + COUNT] = -2
    span = EmbeddingSpan(START, COUNT, sha256(data).digest(), files.write(data))
    slots = np.arange(LENGTH, dtype=np.int32).tobytes()
    windows = slots if runner.ready().num_window_slots else b""
    runner.step(
        StepPlan(
            step=0,
            rows=[Row(0, 0, LENGTH, slots, False, windows)],
            new_seqs=[NewSeq(0, tokens.tobytes(), LENGTH, b"", GREEDY, spans=[span])],
        )
    )
    engine = runner.engine
    assert isinstance(engine, CpuEngine)
    found = np.concatenate(
        [
            engine.logits_of(np.arange(at, min(at + 8, LENGTH), dtype=np.int32)).numpy().copy()
            for at in range(0, LENGTH, 8)
        ]
    )
    p, q = log_softmax(truth), log_softmax(found[:, : truth.shape[1]])
    assert np.sum(np.exp(p) * (p - q), axis=-1).max() < 1e-4

"""DeepStack: Qwen3-VL's tower, whose layers add to the first layers of the text model, beside transformers'."""

from __future__ import annotations

from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.axial import merge_order
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from tests.support.measuring.accuracy import log_softmax
from tests.support.pictures.deepstack_model import (
    DEEP,
    END,
    IMAGE,
    MERGE,
    PATCH,
    START,
    write_model,
    write_tower,
)
from tests.support.pictures.picture_steps import GREEDY
from tests.support.worker.served_answers import load

ROWS, COLUMNS = 2, 3  # tokens
PIXELS = np.random.default_rng(2).integers(0, 256, (ROWS * 8, COLUMNS * 8, 3), dtype=np.uint8)
TOKENS = [50, 60, 70, 80, START, *[IMAGE] * ROWS * COLUMNS, END, *range(100, 120)]
FIRST = TOKENS.index(IMAGE)


@pytest.fixture(scope="module", params=[True, False], ids=["with experts", "dense"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("deep") / "tiny"
    made = write_model(folder, has_experts=request.param).eval()
    write_tower(made, folder.with_name("mmproj.gguf"))
    return made, folder


@pytest.fixture(scope="module")
def tower(model: tuple[Any, Path]) -> Qwen3VlTower:
    file, shape = open_tower(model[1].with_name("mmproj.gguf"))
    assert isinstance(shape, Qwen3VlShape)
    assert shape.deep == tuple(DEEP)
    return Qwen3VlTower(file, shape)


def theirs(tower: Qwen3VlTower) -> dict[str, Any]:
    """The picture as transformers' processor gives it."""
    rows, columns = PIXELS.shape[0] // PATCH, PIXELS.shape[1] // PATCH
    patches = tower._patches_of(torch.from_numpy(PIXELS))[merge_order(rows, columns, MERGE)]
    twice = patches.view(-1, 3, 1, PATCH**2).expand(-1, 3, 2, PATCH**2).reshape(len(patches), -1)
    return {"pixel_values": twice, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def test_the_tower(model: tuple[Any, Path], tower: Qwen3VlTower) -> None:
    with torch.no_grad():
        found = model[0].model.get_image_features(**theirs(tower), return_dict=True)
    parts = [torch.cat(list(part)) for part in (found.pooler_output, *found.deepstack_features)]
    truth = torch.cat(parts, dim=1).numpy()
    ours = tower.encode(PIXELS)
    assert ours.shape == truth.shape == (ROWS * COLUMNS, 3 * 128)
    assert np.linalg.norm(ours - truth) < 1e-5 * np.linalg.norm(truth)


def logits(runner: Runner, files: EmbeddingFiles, data: bytes, chunk: int) -> np.ndarray:
    positions = array("i", [FIRST]) * (ROWS * COLUMNS)
    positions.extend(FIRST + row for row in range(ROWS) for _ in range(COLUMNS))
    positions.extend([*range(FIRST, FIRST + COLUMNS)] * ROWS)
    handle, digest = files.write(data), sha256(data).digest()
    span = EmbeddingSpan(FIRST, ROWS * COLUMNS, digest, handle, positions.tobytes())
    tokens = np.array([-2 if token == IMAGE else token for token in TOKENS], np.int32)
    new = [NewSeq(0, tokens.tobytes(), len(tokens), b"", GREEDY, spans=[span])]
    engine, found = runner.engine, []
    assert isinstance(engine, CpuEngine)
    for at in range(0, len(TOKENS), chunk):
        count = min(chunk, len(TOKENS) - at)
        slots = np.arange(at, at + count, dtype=np.int32).tobytes()
        runner.step(StepPlan(step=at, rows=[Row(0, at, count, slots, False)], new_seqs=new))
        new = []
        for first in range(0, count, 8):
            part = np.arange(first, min(first + 8, count), dtype=np.int32)
            found.append(engine.logits_of(part).numpy().copy())
    return np.concatenate(found)


def test_logits(model: tuple[Any, Path], tower: Qwen3VlTower, tmp_path: Path) -> None:
    """With our embeddings; whole and with chunks' borders in the picture, bit for bit. Without what is added behind the
    first layers they are far off."""
    made, folder = model
    kinds = torch.tensor([[int(token == IMAGE) for token in TOKENS]])
    with torch.no_grad():
        ids = torch.tensor([TOKENS])
        truth = made(input_ids=ids, mm_token_type_ids=kinds, **theirs(tower)).logits[0].numpy()
    files = EmbeddingFiles(tmp_path / "spans")
    runner = build_cpu_runner(load(folder), files)
    ready = runner.ready()
    assert (ready.embedding_size, ready.rotates_in_sections) == (3 * 128, True)
    rows = tower.encode(PIXELS)
    whole = logits(runner, files, rows.tobytes(), 64)
    assert distance(truth, whole) < 1e-4
    for chunk in (7, 16):
        assert np.array_equal(logits(runner, files, rows.tobytes(), chunk), whole)
    rows[:, 128:] = 0.0
    assert distance(truth, logits(runner, files, rows.tobytes(), 64)) > 1e-2


def distance(truth: np.ndarray, found: np.ndarray) -> float:
    """The largest KL of the positions from the picture on."""
    p, q = log_softmax(truth[FIRST:]), log_softmax(found[FIRST:, : truth.shape[1]])
    return float(np.sum(np.exp(p) * (p - q), axis=-1).max())

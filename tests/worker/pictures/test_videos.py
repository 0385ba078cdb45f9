"""Videos beside transformers' processor and model, in float32: chosen frames, sizes, times, embeddings, positions and
logits."""

from __future__ import annotations

from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from moeserve.httpserver.generation.chat.picture_tokens import PictureTokens
from moeserve.httpserver.generation.engine.picture_client import EncodedPicture
from moeserve.httpserver.generation.request.pictures import Picture
from moeserve.messages.pictures import MOST_FRAMES, PictureEncoded, VideoSettings
from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.models.sources.gguf import open_gguf
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.tokenizer import TextTokenizer
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
from moeserve.visualserver.video_frames import chosen_frames, in_twos
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.support.measuring.accuracy import log_softmax
from tests.support.pictures.deepstack_model import (
    DEEP,
    END,
    MERGE,
    PATCH,
    START,
    VIDEO,
    write_model,
    write_tower,
)
from tests.support.pictures.picture_fixture import MODEL
from tests.support.pictures.picture_steps import GREEDY
from tests.support.pictures.random_tower import QWEN36
from tests.support.worker.served_answers import load

ROWS, COLUMNS = 2, 3  # tokens of two frames
SIDES = ROWS * PATCH * MERGE, COLUMNS * PATCH * MERGE
FRAMES = np.random.default_rng(4).integers(0, 256, (6, *SIDES, 3), dtype=np.uint8)


def qwen(kind: str) -> Any:
    """Returns transformers' module of Qwen3-VL."""
    return import_module(f"transformers.models.qwen3_vl.{kind}_qwen3_vl")


def test_sizes() -> None:
    """300 videos, with the cap of a frame's pixels."""
    random = np.random.default_rng(3)
    for _ in range(300):
        rule = QWEN36.frame_rule(int(random.choice([256, 1024, 4096, 12288])))
        count = int(random.integers(2, min(MOST_FRAMES, rule.most_frames) + 1))
        height, width = (int(2 ** random.uniform(3, 12)) for _ in range(2))
        least = rule.min_pixels
        capped = count * max(min(768 * 32 * 32, rule.max_pixels // count), int(least * 1.05))
        rule = replace(rule, num_frames=count)
        try:
            expected = qwen("video_processing").smart_resize(count, height, width, 2, 32, least, capped)
        except ValueError:
            with pytest.raises(ValueError, match="at most 200 times its shorter side"):
                rule.resized(height, width)
            continue
        assert rule.resized(height, width) == expected


def test_frames_and_times() -> None:
    """200 videos."""
    random = np.random.default_rng(5)
    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=MOST_FRAMES)
    for _ in range(200):
        total = int(2 ** random.uniform(0, 14))
        fps, chosen_fps = (
            float(random.choice([10.0, 23.976, 25.0, 30.0, 59.94])),
            random.choice([0.5, 2.0, 7.0]),
        )
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        expected = (
            qwen("video_processing")
            .Qwen3VLVideoProcessor.sample_frames(processor, metadata, fps=chosen_fps)
            .tolist()
        )
        found = chosen_frames(total, fps, chosen_fps, MOST_FRAMES)
        assert found == expected
        _, times = in_twos(np.zeros((len(found), 1), np.uint8), [index / fps for index in found])
        assert list(times) == qwen("processing").Qwen3VLProcessor._calculate_timestamps(
            processor, expected, fps
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("video") / "tiny"
    made = write_model(folder, has_experts=True).eval()
    write_tower(made, folder.with_name("mmproj.gguf"))
    return made, folder


@pytest.fixture(scope="module")
def tower(model: tuple[Any, Path]) -> Qwen3VlTower:
    file, shape = open_tower(model[1].with_name("mmproj.gguf"))
    assert isinstance(shape, Qwen3VlShape)
    return Qwen3VlTower(file, shape)


def theirs() -> dict[str, Any]:
    """The frames as transformers' processor gives them."""
    scaled = torch.from_numpy(FRAMES).permute(0, 3, 1, 2)[None].float() / 127.5 - 1.0
    patches, *grid = qwen("video_processing").Qwen3VLVideoProcessor.patchify(
        SimpleNamespace(), scaled, PATCH, MERGE, 2
    )
    return {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}


def encoded(tower: Qwen3VlTower) -> list[np.ndarray]:
    return [tower.encode(FRAMES[at : at + 2]) for at in range(0, len(FRAMES), 2)]


def test_embeddings(model: tuple[Any, Path], tower: Qwen3VlTower) -> None:
    """Each two frames are encoded alone. Two equal frames are a still picture."""
    with torch.no_grad():
        found = model[0].model.get_video_features(**theirs(), return_dict=True)
    parts = [torch.cat(list(part)) for part in (found.pooler_output, *found.deepstack_features)]
    truth = torch.cat(parts, dim=1).numpy()
    ours = np.concatenate(encoded(tower))
    assert ours.shape == truth.shape == (3 * ROWS * COLUMNS, (1 + len(DEEP)) * 128)
    assert np.linalg.norm(ours - truth) < 1e-5 * np.linalg.norm(truth)
    still = tower.encode(FRAMES[0])
    twice = tower.encode(np.stack([FRAMES[0], FRAMES[0]]))
    assert np.linalg.norm(still - twice) < 1e-5 * np.linalg.norm(still)
    assert np.linalg.norm(ours[: len(still)] - still) > 1e-2 * np.linalg.norm(still)


def test_the_prompt_and_positions() -> None:
    """A time stands before each two frames, in the text that the tokenizer sees."""
    file = open_gguf(MODEL)
    tokenizer = TextTokenizer.from_gguf(file)
    renderer = ChatRenderer(file.metadata.require_str("tokenizer.chat_template"), {})
    try:
        tokens = PictureTokens.of(tokenizer, renderer)
    finally:
        renderer.close()
    mark = Picture(b"", video=VideoSettings()).mark
    answer = PictureEncoded(
        1,
        ROWS,
        COLUMNS,
        bytes(32),
        "0a",
        0.1,
        False,
        ((bytes(32), "0b"), (bytes(32), "0c")),
        (0.25, 1.3, 12.0),
    )
    video = EncodedPicture(answer, lambda handle: None)
    prompt = tokens.encode(tokenizer, [f"Look: {mark} What", " happens?"], {mark: video})
    (start,), (pad,), (end,) = map(tokenizer.encode, ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"))
    rows = [start, *[pad] * ROWS * COLUMNS, end]
    assert prompt.ids == [
        *tokenizer.encode("Look: <0.2 seconds>"),
        *rows,
        *tokenizer.encode("<1.3 seconds>"),
        *rows,
        *tokenizer.encode("<12.0 seconds>"),
        *rows,
        *tokenizer.encode(" What"),
        *tokenizer.encode(" happens?"),
    ]
    assert tokens.shown([f"Look: {mark}?"]) == "Look: <|vision_start|><|video_pad|><|vision_end|>?"
    grid = torch.tensor([[3, ROWS * MERGE, COLUMNS * MERGE]])
    kinds = torch.tensor([[2 * (token == pad) for token in prompt.ids]])
    stub = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)),
        get_vision_position_ids=lambda *given, **more: qwen("modeling").Qwen3VLModel.get_vision_position_ids(
            None, *given, **more
        ),
    )
    truth, _ = qwen("modeling").Qwen3VLModel.get_rope_index(
        stub, torch.tensor([prompt.ids]), kinds, video_grid_thw=grid
    )
    assert [handle for span in prompt.spans for handle in [span.handle]] == ["0a", "0b", "0c"]
    for span in prompt.spans:
        found = np.frombuffer(span.positions, np.int32).reshape(3, -1)
        assert np.array_equal(found, truth[:, 0, span.start : span.end].numpy())


def test_logits(model: tuple[Any, Path], tower: Qwen3VlTower, tmp_path: Path) -> None:
    """A prompt with three times two frames."""
    made, folder = model
    tokens, starts = [50, 60, 70], []
    for time in range(3):
        starts.append(len(tokens) + 2)
        tokens += [80 + time, START, *[VIDEO] * ROWS * COLUMNS, END]
    tokens += range(100, 120)
    kinds = torch.tensor([[2 * (token == VIDEO) for token in tokens]])
    with torch.no_grad():
        ids = torch.tensor([tokens])
        truth = made(input_ids=ids, mm_token_type_ids=kinds, **theirs()).logits[0].numpy()
        positions, _ = made.model.get_rope_index(ids, kinds, video_grid_thw=theirs()["video_grid_thw"])
    files = EmbeddingFiles(tmp_path / "spans")
    spans = []
    for start, part in zip(starts, encoded(tower), strict=True):
        places = positions[:, 0, start : start + ROWS * COLUMNS].numpy().astype(np.int32).tobytes()
        data = part.tobytes()
        spans.append(EmbeddingSpan(start, len(part), sha256(data).digest(), files.write(data), places))
    runner = build_cpu_runner(load(folder), files)
    ours = np.array([-2 if token == VIDEO else token for token in tokens], np.int32)
    new = [NewSeq(0, ours.tobytes(), len(ours), b"", GREEDY, spans=spans)]
    slots = np.arange(len(tokens), dtype=np.int32).tobytes()
    runner.step(StepPlan(step=0, rows=[Row(0, 0, len(tokens), slots, False)], new_seqs=new))
    engine = runner.engine
    assert isinstance(engine, CpuEngine)
    rows = [np.arange(at, min(at + 8, len(tokens)), dtype=np.int32) for at in range(0, len(tokens), 8)]
    found = np.concatenate([engine.logits_of(part).numpy().copy() for part in rows])
    p, q = log_softmax(truth), log_softmax(found[:, : truth.shape[1]])
    assert float(np.sum(np.exp(p) * (p - q), axis=-1).max()) < 1e-4

"""RoPE positions of a step's rows and of the first tokens of their blocks, behind and within pictures."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs
from moeserve.worker.engines.gpu.steps.step_path import StepPath
from moeserve.worker.engines.request_embeddings import RequestEmbeddings
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Sequences, StepLayout
from tests.support.models import qwen4exp_model

PICTURE = np.array(
    [[10] * 6, [10, 10, 10, 11, 11, 11], [10, 11, 12] * 2], np.int32
)  # of 2 x 3 tokens, from 10 on
LENGTH = 40


def positions() -> RotaryPositions:
    """Request slot 3 has the picture; slot 5 has none."""
    found = RotaryPositions()
    found.bind(3, [EmbeddingSpan(10, 6, bytes(32), "a", PICTURE.tobytes())])
    found.bind(5, [])
    return found


def layout(*rows: tuple[int, int, int]) -> StepLayout:
    """rows: request slot, start and count of each."""
    return StepLayout([Row(slot, start, count, bytes(4 * count), False) for slot, start, count in rows])


def expected(numbers: list[int]) -> np.ndarray:
    by_section = np.tile(np.array(numbers, np.int32), (3, 1))
    for column, number in enumerate(numbers):
        if 10 <= number < 16:
            by_section[:, column] = PICTURE[:, number - 10]
        elif number >= 16:
            by_section[:, column] -= 3
    return by_section


def of(found: np.ndarray) -> np.ndarray:
    return found if found.ndim == 2 else np.tile(found, (3, 1))


@pytest.mark.parametrize(("start", "count"), [(0, LENGTH), (8, 4), (12, 9), (16, 1), (17, 3), (0, 10)])
def test_rows_and_the_first_tokens_of_their_blocks(start: int, count: int) -> None:
    step, numbers = layout((3, start, count), (5, 30, 2)), list(range(start, start + count))
    found = of(positions().of_step(step))
    assert np.array_equal(found[:, :count], expected(numbers))
    assert np.array_equal(found[:, count:], np.tile([30, 31], (3, 1)))
    firsts = of(positions().at(step, step.position // 4 * 4))
    assert np.array_equal(firsts[:, :count], expected([number // 4 * 4 for number in numbers]))
    assert np.array_equal(firsts[:, count:], np.tile([28, 28], (3, 1)))


def test_without_a_picture_they_are_the_tokens_numbers() -> None:
    step = layout((5, 30, 2))
    assert positions().of_step(step) is step.position


def test_a_step_of_a_model_with_blocks_has_both(tmp_path: Path) -> None:
    """And without pictures, none: its kernels then know the positions."""
    model = qwen4exp_model.write_model(qwen4exp_model.new_model(8), tmp_path / "m.gguf", Type.F16)
    shape, files = read_shape(open_gguf(model)), EmbeddingFiles(tmp_path / "spans")
    data = np.zeros((6, shape.hidden_size), np.float32).tobytes()
    span = EmbeddingSpan(10, 6, sha256(data).digest(), files.write(data), PICTURE.tobytes())
    embeddings, tokens = RequestEmbeddings(files, shape), np.zeros(LENGTH, np.int32).tobytes()
    embeddings.bind(NewSeq(3, tokens, LENGTH, b"", SamplingParams(max_tokens=1), state_slot=0, spans=[span]))
    embeddings.bind(NewSeq(5, tokens, LENGTH, b"", SamplingParams(max_tokens=1), state_slot=1))
    found = embeddings.of_step(layout((3, 18, 3)))
    assert np.array_equal(of(found.rotary_positions), expected([18, 19, 20]))
    assert found.first_positions is not None
    assert np.array_equal(of(found.first_positions), expected([16, 16, 20]))
    assert embeddings.of_step(layout((5, 18, 3))).first_positions is None


def test_a_block_has_those_of_the_tokens_before(tmp_path: Path) -> None:
    """Positions of a next-token block's rows, also in a GPU's columns."""
    model = qwen4exp_model.write_model(qwen4exp_model.new_model(8), tmp_path / "m.gguf", Type.F16)
    read = read_shape(open_gguf(model))
    shape, files = replace(read, next_token_layer=read.layers[-1]), EmbeddingFiles(tmp_path / "spans")
    data = np.zeros((6, shape.hidden_size), np.float32).tobytes()
    span = EmbeddingSpan(10, 6, sha256(data).digest(), files.write(data), PICTURE.tobytes())
    embeddings, tokens = RequestEmbeddings(files, shape), np.zeros(LENGTH, np.int32).tobytes()
    sequences = Sequences(8, LENGTH)
    for slot, spans in ((3, [span]), (5, [])):
        new = NewSeq(
            slot, tokens, LENGTH, b"", SamplingParams(max_tokens=1), state_slot=slot - 3, spans=spans
        )
        embeddings.bind(new)
        sequences.bind(new)
    inputs = StepInputs(
        8, 8, 8, torch.device("cpu"), max_model_len=LENGTH, num_kv_slots=LENGTH, has_sections=True, has_block=True
    )  # fmt: skip
    for step, numbers in ((layout((3, 0, 3)), [0, 0, 1]), (layout((3, 15, 3)), [14, 15, 16])):
        inputs.fill(step, sequences, embeddings.of_step(step))
        inputs.copy()
        found = inputs.batch(StepPath(8, 3, has_tiles=False)).rotary_before
        assert found is not None
        assert np.array_equal(found[:3].T, expected(numbers))
        assert not found[3:].any()
    only_text = layout((5, 0, 3))
    assert embeddings.of_step(only_text).before_positions is None
    inputs.fill(only_text, sequences)
    inputs.copy()
    found = inputs.batch(StepPath(8, 3, has_tiles=False)).rotary_before
    assert found is not None
    assert found[:3].tolist() == [[0] * 3, [0] * 3, [1] * 3]

"""The look-up of n-gram embeddings by C++, beside its specification: `NgramHashes` and `TableRows`."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels import _C
from moeserve.kernels.ngrams.hashing import NgramHashes
from moeserve.models import residual
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.models.loading.table_rows import TableRows
from moeserve.models.residual import NgramShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.dummy import open_dummy
from moeserve.models.sources.gguf.file import open_gguf
from tests.support.models.gguf_bytes import Tensor, gguf_bytes

Int32s = npt.NDArray[np.int32]

ROWS, COLS, END = 60, 32, 2
HEADS = ((11, 13, 17, 19), (0, 11, 24, 41))  # rows, offsets
LARGE = (2**62 + 5, 2**61 + 3, 2**63 - 25)  # products wrap
SHAPES = [
    NgramShape(1, NgramHashes(multipliers, *HEADS, end_token=END), COLS, ROWS, 4)
    for multipliers in ((5, 3, 7), LARGE)
]


def write_table(path: Path) -> Path:
    """Row i holds the number i."""
    numbers = np.repeat(np.arange(ROWS, dtype=np.float32), COLS).reshape(ROWS, COLS)
    header = gguf_bytes({}, [Tensor(n.LAYER_INPUT_EMBD, (COLS, ROWS), Type.F32)])
    path.write_bytes(header[: len(header) - numbers.nbytes] + numbers.tobytes())
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache has ten places."""
    monkeypatch.setattr(residual, "TABLE_CACHE_BYTES", 10 * COLS * 4)
    return write_table(tmp_path / "m.gguf")


def ids(count: int, seed: int) -> tuple[Int32s, Int32s]:
    """Tokens and the two before each; some are the end, or before the text's beginning."""
    rng = np.random.default_rng(seed)
    tokens, previous = (rng.integers(low, 300, shape) for low, shape in ((0, count), (-1, (count, 2))))
    previous[rng.random((count, 2)) < 0.2] = END
    previous[rng.random((count, 2)) < 0.2] = -1
    return tokens.astype(np.int32), previous.astype(np.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=["small numbers", "products that wrap"])
@pytest.mark.parametrize("is_dummy", [False, True], ids=["file", "random weights"])
def test_as_specified(path: Path, shape: NgramShape, is_dummy: bool) -> None:
    source = open_dummy(path) if is_dummy else open_gguf(path)
    table, specified = NgramRows(source, shape), TableRows(source, n.LAYER_INPUT_EMBD)
    assert table.can_wait
    for seed, count in enumerate((1, 3, 64, 0, 1, 500)):
        tokens, previous = ids(count, seed)
        expected = specified.take(shape.hashes.rows(tokens, previous))
        assert np.array_equal(table.take(tokens, previous), expected)
        assert table.take_counts() == specified.take_counts()


def test_a_job_gives_floats_to_any_thread(path: Path) -> None:
    shape = SHAPES[0]
    table = NgramRows(open_gguf(path), shape)
    tokens, previous = ids(40, 1)
    out = torch.full((40, shape.width), torch.nan)
    known = torch.zeros(40, dtype=torch.int32)
    job = table.job(known, previous, out)
    previous_then = previous.copy()
    previous[:] = 0  # the job has a copy
    known.copy_(torch.from_numpy(tokens))  # known after the launch
    thread = threading.Thread(target=_C.run_ngram_job, args=(job,))
    thread.start()
    thread.join()
    rows = shape.hashes.rows(tokens, previous_then)
    assert torch.equal(out.view(40, 4, COLS)[:, :, 0], torch.from_numpy(rows.astype(np.float32)))
    out[:] = torch.nan
    known[0] = -7
    _C.run_ngram_job(table.job(known, previous_then[:1], out))
    zero = shape.hashes.rows(np.zeros(1, np.int32), previous_then[:1])
    assert out.view(40, 4, COLS)[0, :, 0].tolist() == zero[0].tolist()
    assert out[1:].isnan().all()


def test_failures_of_the_step_after_are_told_with_that_step(path: Path) -> None:
    table = NgramRows(open_gguf(path), SHAPES[0])
    tokens, previous = np.array([9, 9, 200], np.int32), np.array([[8, 6], [8, 6], [-1, -1]], np.int32)
    table.take(tokens[:1], previous[:1])
    table.take_counts()
    with path.open("r+b") as file:
        file.write(b"G")
    found = table.take(tokens, previous).view(np.float32)
    assert table.take_failures(is_followed=True) == []
    assert not found.reshape(3, 4, COLS)[2].all(axis=1).any()
    out = torch.full((1, SHAPES[0].width), torch.nan)
    token = torch.tensor([100], dtype=torch.int32)
    job = table.job(token, previous[2:], out)
    before = table.take_failures(is_followed=True)
    _C.run_ngram_job(job)
    assert not out.any()
    assert [token for token, _ in before] == [2]
    assert "the file was changed while it was served" in before[0][1]
    assert table.take_failures(is_followed=True) == []
    assert [token for token, _ in table.take_failures()] == [0]
    assert table.take_failures() == []


def test_arguments_that_do_not_fit() -> None:
    row = np.zeros((ROWS, 8), np.uint8)
    parts, form = [(row.ctypes.data, ROWS, 8, 1, ROWS)], (0, 2, 8, 0, 1.0)

    def make(
        rows: tuple[int, ...], offsets: tuple[int, ...], multipliers: tuple[int, ...] = (5, 3)
    ) -> _C.NgramTable:
        return _C.NgramTable.make(parts, [], (multipliers, rows, offsets, END), form, 4)

    for rows, offsets in (
        ((ROWS + 1,), (0,)),
        ((2**63 - 1,), (5,)),
        ((5,), (-1,)),
        ((0,), (0,)),
        ((1,), (ROWS,)),
    ):
        with pytest.raises(ValueError, match="heads: rows outside the table of 60 rows"):
            make(rows, offsets)
    for multipliers in ((), (5,), (5, 3, 7)):
        with pytest.raises(ValueError, match="heads: their numbers do not fit the orders"):
            make((5,), (0,), multipliers)
    table, tokens = make((ROWS,), (0,)), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=r"previous: \[3, 1\] wanted"):
        table.take(tokens, np.zeros((3, 2), np.int32), np.zeros((3, 8), np.uint8))
    with pytest.raises(ValueError, match="out: rows of all heads wanted"):
        table.take(tokens, np.zeros((3, 1), np.int32), np.zeros((3, 4), np.uint8))

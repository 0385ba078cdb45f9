"""Rows of a table that stays in the file: which are read, which are kept, and what is refused."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.models import residual
from moeserve.models.errors import ModelError
from moeserve.models.loading.table_rows import TableRows
from moeserve.models.sources.gguf import open_gguf
from moeserve.models.sources.gguf.dummy import open_dummy
from tests.support.models.gguf_bytes import Tensor, gguf_bytes

ROWS, COLS = 50, 32


def write_table(path: Path) -> Path:
    """Row i holds the number i."""
    numbers = np.repeat(np.arange(ROWS, dtype=np.float32), COLS).reshape(ROWS, COLS)
    header = gguf_bytes({}, [Tensor("table", (COLS, ROWS), Type.F32)])
    path.write_bytes(header[: len(header) - numbers.nbytes] + numbers.tobytes())
    return path


def ids(*rows: int) -> npt.NDArray[np.int64]:
    """One row for each token."""
    return np.array(rows, np.int64)[:, None]


def numbers(found: npt.NDArray[np.uint8]) -> list[float]:
    values = np.ascontiguousarray(found).view(np.float32)
    assert (values == values[:, :1]).all()
    return [float(value) for value in values[:, 0]]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableRows:
    """With places for ten rows."""
    monkeypatch.setattr(residual, "TABLE_CACHE_BYTES", 10 * COLS * 4)
    return TableRows(open_gguf(write_table(tmp_path / "m.gguf")), "table")


def test_a_row_is_read_once_and_found_again(table: TableRows) -> None:
    assert numbers(table.take(ids(7, 3, 7))) == [7, 3, 7]
    assert (table.hits, table.reads) == (0, 2)
    assert numbers(table.take(ids(3, 7, 4))) == [3, 7, 4]
    assert (table.hits, table.reads) == (2, 3)


def test_rows_of_one_place_take_turns(table: TableRows) -> None:
    assert numbers(table.take(ids(4, 14, 24, 4))) == [4, 14, 24, 4]
    assert numbers(table.take(ids(14, 4, 44))) == [14, 4, 44]
    for row in range(ROWS):
        assert numbers(table.take(ids(row, (row + 10) % ROWS))) == [row, (row + 10) % ROWS]


def test_many_rows_at_once(table: TableRows) -> None:
    wanted = np.random.default_rng(0).integers(0, ROWS, (250, 2))
    assert numbers(table.take(wanted)) == wanted.reshape(-1).tolist()
    assert table.hits + table.reads <= 500


def test_a_row_beside_the_table_is_refused(table: TableRows) -> None:
    for row in (-1, ROWS):
        with pytest.raises(IndexError, match="outside the table of 50 rows"):
            table.take(ids(1, row))
    assert table.reads == 0


def test_tokens_that_lack_a_row_are_named_once(table: TableRows, tmp_path: Path) -> None:
    table.take(ids(1, 2))
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.write(b"G")
    found = table.take(np.array([[1, 2], [2, 5], [1, 1], [6, 6]]))
    assert numbers(found) == [1, 2, 2, 0, 1, 1, 0, 0]
    failures = table.take_failures()
    assert [token for token, _ in failures] == [1, 3]
    assert all("the file was changed while it was served" in cause for _, cause in failures)
    assert table.take_failures() == []
    assert numbers(table.take(ids(5))) == [0]


def test_a_file_that_changes_between_its_mapping_and_the_table(tmp_path: Path) -> None:
    """Minutes pass between the two, if a model's other weights are large."""
    path = write_table(tmp_path / "m.gguf")
    changed = open_gguf(path)
    with path.open("r+b") as file:
        file.write(b"G")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match=r"m\.gguf: was replaced or changed since it was loaded"):
        TableRows(changed, "table")
    TableRows(open_gguf(path), "table")
    renamed = open_gguf(path)
    write_table(tmp_path / "other.gguf").rename(path)
    with pytest.raises(ModelError, match="was replaced or changed since it was loaded"):
        TableRows(renamed, "table")


def test_a_file_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[object] = []  # errors while a half-made object is destroyed
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    source = open_gguf(write_table(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(ModelError, match=r"m\.gguf: its rows cannot be read: No such file or directory"):
        TableRows(source, "table")
    gc.collect()
    assert not ignored


def test_a_dummy_table_has_random_rows_that_stay(tmp_path: Path) -> None:
    path = write_table(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[: -COLS * 4 * ROWS])
    first, again = (TableRows(open_dummy(path), "table").take(ids(3, 9, 3)) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.array_equal(first[0], first[2])
    assert not np.array_equal(first[0], first[1])

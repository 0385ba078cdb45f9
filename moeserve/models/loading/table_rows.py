"""Reads rows of a table that stays in the model file, because it is too large for RAM and a token needs only a few
rows.

Recently used rows are kept in RAM, in a direct-mapped cache: each row has one possible place, which it shares with
other rows. If the file is written to while it is served, its rows are not read any more: tokens that need one fail.
`NgramRows` does the same in C++ where the rows are in mapped memory.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import ModelError, replaced_error
from moeserve.models.residual import cached_table_bytes
from moeserve.models.sources.regular_file import FileVersion
from moeserve.models.sources.source import ModelSource

Rows = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
CHANGED = "a row of {name} could not be read from disk: the file was changed while it was served; restart the server"


class TableRows:
    """Reads rows of an embedding table from the model's file, and caches recent ones in RAM. Rows are in the
    file's type."""

    def __init__(self, source: ModelSource, name: str) -> None:
        """Raises ModelError for a file that cannot be opened, or that was replaced since it was mapped."""
        tensor = source.tensors[name]
        self._source, self._name = source, name
        self.ggml_type = int(tensor.type)
        self.count = tensor.shape[0]  # rows of the table
        self.row_bytes = tensor.nbytes // tensor.shape[0]
        self.cached = max(1, cached_table_bytes(tensor.nbytes) // self.row_bytes)  # most rows in RAM
        self.hits = 0  # rows found in RAM since the last `take_counts`
        self.reads = 0  # rows read from the file since the last `take_counts`
        self.files = [OpenFile(path, version) for path, version in source.files_of(name).items()]
        self._failed = np.zeros(0, np.int64)

    @cached_property
    def _row_at(self) -> Int64s:
        """The number of the row at each place; -1: empty."""
        return np.full(self.cached, -1, np.int64)

    @cached_property
    def _rows(self) -> Rows:
        return np.empty(
            (self.cached, self.row_bytes), np.uint8
        )  # the system allocates the pages at first use

    def take(self, of_tokens: Int64s) -> Rows:
        """Returns the bytes of the tokens' rows, uint8 [tokens * heads, row_bytes], and caches them; zeros for rows
        that cannot be read, see `take_failures`. of_tokens: [tokens, heads]. Raises IndexError for a row outside the
        table, before anything is read."""
        rows = of_tokens.reshape(-1)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.count:
            raise IndexError(
                f"rows {int(rows.min())} to {int(rows.max())} are outside the table of {self.count} rows"
            )
        place = rows % len(self._row_at)
        is_missing = self._row_at[place] != rows
        found: Rows = self._rows[place]
        missing = rows[is_missing]
        self.hits += len(rows) - len(missing)
        if len(missing):
            # Ascending, so that the file is read in order.
            distinct, inverse = np.unique(missing, return_inverse=True)
            read = self._read(distinct)
            if read is None:
                found[is_missing] = 0
                is_failed = is_missing.reshape(of_tokens.shape).any(axis=1)
                self._failed = np.union1d(self._failed, np.flatnonzero(is_failed))
            else:
                found[is_missing] = read[inverse]
                self._keep(distinct, read)
        return found

    def take_failures(self) -> list[tuple[int, str]]:
        """Returns the tokens of `take` since the last call that lacked a row, by number, each with the cause."""
        failed, self._failed = self._failed, np.zeros(0, np.int64)
        return [(token, self.changed) for token in failed.tolist()]

    @property
    def changed(self) -> str:
        """The cause of failures."""
        return CHANGED.format(name=self._name)

    def _read(self, rows: Int64s) -> Rows | None:
        """Reads rows from the file; returns None if it has changed. It is looked at before, because a mapped file that
        has become shorter must not be touched, and after."""
        if any(file.is_changed for file in self.files):
            return None
        read = self._source.rows(self._name, rows)
        self.reads += len(rows)
        return None if any(file.is_changed for file in self.files) else read

    def take_counts(self) -> tuple[int, int]:
        """Returns `hits` and `reads` since the last call."""
        counts = self.hits, self.reads
        self.hits = self.reads = 0
        return counts

    def _keep(self, rows: Int64s, read: Rows) -> None:
        # If several rows share a place, one of them stays.
        place, first = np.unique(rows % len(self._row_at), return_index=True)
        self._row_at[place] = rows[first]
        self._rows[place] = read[first]


class OpenFile:
    """A file whose later changes are noticed, also after another has its name."""

    def __init__(self, path: Path, version: FileVersion) -> None:
        """version: of the file that is mapped. Raises ModelError if the path cannot be opened or has another file or
        version now."""
        self._fd = -1  # not open
        self._version = version
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            is_changed = self.is_changed
        except OSError as error:
            raise ModelError(path, f"its rows cannot be read: {error.strerror or error}") from error
        if is_changed:
            raise replaced_error(path)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def number_and_version(self) -> tuple[int, int, int, int, int]:
        """The open file's number, then the fields of the version."""
        return self._fd, *self._version

    @property
    def is_changed(self) -> bool:
        return FileVersion.of(self._fd) != self._version

"""Looks up the n-gram embeddings of tokens, by one call of C++ where the table's rows are in mapped memory
(csrc/ngrams/ngram_table.h). `NgramHashes` and `TableRows` specify the look-up, and serve tables whose rows are made
otherwise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.kernels import _C
from moeserve.models.loading.table_rows import Rows, TableRows
from moeserve.models.residual import NgramShape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

Int32s = npt.NDArray[np.int32]


class NgramRows:
    """The rows of a model's table, and a cache of recent ones in RAM."""

    def __init__(self, source: ModelSource, shape: NgramShape) -> None:
        """Raises ModelError for a file that cannot be opened, or that was replaced since it was mapped."""
        self._rows = rows = TableRows(source, n.LAYER_INPUT_EMBD)
        self._hashes, self.ggml_type = shape.hashes, rows.ggml_type
        self._heads = len(shape.hashes.head_rows)
        self._places = places = source.row_places(n.LAYER_INPUT_EMBD)
        self._native: _C.NgramTable | None = None  # None: rows are not in mapped memory
        if places is not None:
            hashes = shape.hashes
            self._native = _C.NgramTable.make(
                list(places.parts),
                [file.number_and_version for file in rows.files],
                (hashes.multipliers, hashes.head_rows, hashes.head_offsets, hashes.end_token),
                (rows.ggml_type, shape.head_width, rows.row_bytes, places.scaled_block, places.scale),
                rows.cached,
            )

    @property
    def can_wait(self) -> bool:
        """True if `job` may be called."""
        return self._native is not None

    def take(self, tokens: Int32s, previous: Int32s) -> Rows:
        """Returns the bytes of the tokens' rows, uint8 [tokens * heads, bytes of a row]; zeros for rows that cannot be
        read, see `take_failures`. tokens, previous: see `NgramHashes.rows`."""
        if self._native is None:
            return self._rows.take(self._hashes.rows(tokens, previous))
        out = np.empty((len(tokens) * self._heads, self._rows.row_bytes), np.uint8)
        self._native.take(tokens, previous, out)
        return out

    def job(self, tokens: Tensor, previous: Int32s, out: Tensor) -> int:
        """Begins a look-up of tokens that are not known yet. Returns the argument for one call of `_C.NGRAM_JOB`, by
        any thread, which reads tokens, int32 [n], and writes out, float32 [n, width], both on the CPU and kept by the
        caller until then. previous: see
        `NgramHashes.rows`."""
        assert self._native is not None
        return self._native.job(tokens.data_ptr(), previous, out.data_ptr())

    def take_failures(self, *, is_followed: bool = False) -> list[tuple[int, str]]:
        """Returns the tokens since the last call that lacked a row, by number, each with the cause. is_followed: the
        last look-up is of a step after the one that has ended, and is left out."""
        if self._native is None:
            return self._rows.take_failures()
        return [(token, self._rows.changed) for token in self._native.take_failures(int(is_followed))]

    def take_counts(self) -> tuple[int, int]:
        """Returns the rows found in RAM and the rows read from the file since the last call."""
        return self._rows.take_counts() if self._native is None else self._native.take_counts()

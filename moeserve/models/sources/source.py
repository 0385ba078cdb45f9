"""The interface of an opened model, for all file formats.

A GGUF file (`gguf`) and a Hugging Face folder (`huggingface`) both provide GGUF's metadata keys, tensor names,
shapes and types. So one implementation each reads the model, the tokenizer and the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moeserve.models.sources.experts_in_file import ExpertsInFile
from moeserve.models.sources.gguf import Metadata, TensorInfo
from moeserve.models.sources.regular_file import FileVersion
from moeserve.models.sources.row_places import RowPlaces


class TensorSource(Protocol):
    """Tensors and metadata with checked headers: `data` always matches `tensors`."""

    @property
    def path(self) -> Path:
        """Path for error messages."""
        ...

    @property
    def architecture(self) -> str: ...

    @property
    def metadata(self) -> Metadata:
        """Metadata under GGUF's keys: architecture, tokenizer, chat template."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by GGUF name (`gguf.names`); expert tensors have shape [E, out, in]."""
        ...

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the tensor's bytes: uint8 [nbytes], read-only, rows contiguous; a view of the file, or a copy that
        lasts as long as it is referenced. KeyError if absent."""
        ...

    def advise_done(self, name: str) -> None:
        """Notes that the tensor was read, so its file pages need no longer count as this process's memory."""
        ...


class ModelSource(TensorSource, Protocol):
    """An opened model."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Bytes of next-token (MTP) tensors that `tensors` leaves out, by the file's own names."""
        ...

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together."""
        ...

    @property
    def is_mapped(self) -> bool:
        """True if `data` returns a view of the mapped file for every tensor, so weights can be used in place."""
        ...

    def drop_cached(self, name: str) -> None:
        """Removes the tensor's bytes from the system's page cache, after `advise_done`. A source that reads a tensor
        from several places keeps them."""
        ...

    def rows(
        self, name: str, rows: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns a copy of some of the tensor's rows: uint8 [n, bytes of a row]. No others are read from the disk."""
        ...

    def row_places(self, name: str) -> RowPlaces | None:
        """Returns where the rows that `rows` reads are in mapped memory, and switches read-ahead off for them; None if
        they are made when they are read. KeyError if absent."""
        ...

    def files_of(self, name: str) -> Mapping[Path, FileVersion]:
        """Returns the files from which `rows` reads a tensor, as they were when they were mapped; empty if it makes the
        rows. KeyError if absent."""
        ...

    def experts_in_file(self, name: str) -> ExpertsInFile | None:
        """Returns where the file has an expert tensor's bytes as `data` returns them; None if `data` makes them.
        KeyError if absent."""
        ...

"""What a model is loaded from, whatever format its files have.

There are two: a GGUF file (`gguf`), and a Hugging Face folder (`huggingface`), which speaks GGUF's language: the same
metadata keys, tensor names, shapes and types. So the model, the tokenizer and the chat template are each read by one
piece of code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moeserve.models.sources.gguf import Metadata, TensorInfo


class ModelSource(Protocol):
    """An opened model. Its headers were checked: what `tensors` says of a tensor is what `data` gives."""

    @property
    def path(self) -> Path:
        """For error messages."""
        ...

    @property
    def metadata(self) -> Metadata:
        """Under GGUF's keys: the architecture's, the tokenizer's, the chat template."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By GGUF's names (`gguf.names`); an expert tensor is one of shape [E, out, in]."""
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """Bytes of the tensors for further tokens (MTP) that `tensors` leaves out, by the files' own names."""
        ...

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together."""
        ...

    @property
    def is_mapped(self) -> bool:
        """Whether `data` is a view of the mapped file for every tensor, so that weights can be used in place."""
        ...

    @property
    def architecture(self) -> str: ...

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the tensor's bytes: uint8 [nbytes], read-only, rows contiguous; a view of the file, or a copy that
        lasts as long as it is referenced. KeyError if absent."""
        ...

    def advise_done(self, name: str) -> None:
        """The tensor has been read: its pages of the file need not count as our memory any more."""
        ...

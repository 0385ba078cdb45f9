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

from moeserve.models.errors import ModelError
from moeserve.models.gguf import Metadata, TensorInfo, open_gguf
from moeserve.models.gguf.dummy import open_dummy
from moeserve.models.huggingface import is_hugging_face_folder, open_folder


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
        """The tensor's bytes: uint8 [nbytes], read-only, rows contiguous; a view of the file, or a copy that lasts
        as long as somebody holds it. KeyError if absent."""
        ...

    def advise_done(self, name: str) -> None:
        """The tensor has been read: its pages of the file need not count as our memory any more."""
        ...


def open_model(path: Path) -> ModelSource:
    """Opens and checks the model at `path`: a .gguf file, any file of a split set, a folder with one such model, or
    a folder in Hugging Face's layout (config.json, tokenizer.json, *.safetensors). Raises ModelError."""
    return open_folder(path) if is_hugging_face_folder(path) else open_gguf(path)


def open_metadata(path: Path) -> ModelSource:
    """The same for whoever needs no weights: a GGUF file may end before them. Their bytes must not be asked for."""
    return open_folder(path) if is_hugging_face_folder(path) else open_gguf(path, has_tensors=False)


def open_dummy_model(path: Path) -> ModelSource:
    """The same with random weights of a GGUF file's shapes, for benchmarks. Raises ModelError."""
    if is_hugging_face_folder(path):
        raise ModelError(path, "random weights need a GGUF file's header: leave --load-format out")
    return open_dummy(path)

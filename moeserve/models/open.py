"""Opens a model in any supported format."""

from __future__ import annotations

from pathlib import Path

from moeserve.models.errors import ModelError
from moeserve.models.registry import family_of_config
from moeserve.models.sources.gguf import open_gguf
from moeserve.models.sources.gguf.dummy import open_dummy
from moeserve.models.sources.huggingface import (
    HuggingFaceFolder,
    is_hugging_face_folder,
    open_mapped_folder,
    read_config,
)
from moeserve.models.sources.source import ModelSource


def open_model(path: Path) -> ModelSource:
    """Opens and checks the model at `path`, and returns it without reading weights: a .gguf file, any file of a split
    set, a folder with one such model, or a folder in Hugging Face's layout (config.json, tokenizer.json,
    *.safetensors). Raises ModelError for a file that is missing or damaged, and for a model that is not supported."""
    return open_folder(path) if is_hugging_face_folder(path) else open_gguf(path)


def open_metadata(path: Path) -> ModelSource:
    """Opens a model as `open_model` does, for readers that need no weights: a GGUF file may be truncated after the
    header, so its tensors' data must not be read. Raises ModelError."""
    return open_folder(path) if is_hugging_face_folder(path) else open_gguf(path, has_tensors=False)


def open_dummy_model(path: Path) -> ModelSource:
    """Opens a model with random weights of a GGUF file's shapes, for benchmarks. Raises ModelError if it is no GGUF
    file."""
    if is_hugging_face_folder(path):
        raise ModelError(
            path, "--load-format dummy needs a GGUF file, whose header gives the shapes; leave it out"
        )
    return open_dummy(path)


def open_folder(path: Path) -> HuggingFaceFolder:
    """Opens and returns a model in a folder of Hugging Face's layout. Raises ModelError for a file that is missing or
    damaged, and for a model or a setting that is not supported."""
    family, config = family_of_config(path / "config.json", read_config(path))
    assert family.hugging_face is not None
    return open_mapped_folder(path, config, family.architecture, family.hugging_face)

"""Opens an adapter of either format."""

from __future__ import annotations

import os
from pathlib import Path

from moeserve.models.adapters.errors import AdapterError
from moeserve.models.adapters.peft_config import CONFIG_FILE
from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import WEIGHTS_FILE, PeftAdapter
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.gguf.file import split_set


def open_adapter(
    name: str, path: Path, shape: ModelShape, folder: Path | None = None
) -> PeftAdapter | GgufAdapter:
    """Opens an adapter, a PEFT folder or a GGUF file, checks its header against the model's shape, and returns it;
    reads no weights. Raises AdapterError if it cannot be read, is not supported or does not fit.

    folder: an absolute path without links; all files, with links resolved, must be inside it. None: no restriction.
    """
    is_folder = path.is_dir()
    if folder is not None:
        for file in _files_of(path, is_folder=is_folder):
            if not Path(os.path.realpath(file)).is_relative_to(folder):
                raise AdapterError(
                    file, "is a link that leads out of the folder of --lora-dir; copy the files into it"
                )
    return PeftAdapter(name, path, shape) if is_folder else GgufAdapter(name, path, shape)


def _files_of(path: Path, *, is_folder: bool) -> list[Path]:
    if is_folder:
        return [path / CONFIG_FILE, path / WEIGHTS_FILE]
    try:
        return split_set(path)
    except ModelError as error:
        raise AdapterError(path, str(error).removeprefix(f"{path}: ")) from error

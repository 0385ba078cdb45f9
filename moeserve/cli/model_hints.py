"""Suggestions for a model that does not exist: the end of an error's message."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final

from moeserve.cli import ollama_models
from moeserve.models.sources.model_files import split_names

MAX_NAMED: Final = 3
_REPOSITORY: Final = re.compile(r"models--(.+?)--(.+)")  # a folder of the Hub's cache
_MOST_ENTRIES: Final = 10_000  # entries of a folder that are searched


def for_missing(path: Path) -> str:
    """Returns a hint for a path that does not exist: where it leads as a link, similar names beside it, else how models
    are named."""
    if path.is_symlink():
        return f"; it is a link to {os.readlink(path)}, which is not there"
    folder = next(one for one in path.parents if one.is_dir())
    wrong = path.relative_to(folder).parts[0]
    names = [entry.name for entry in islice(_entries(folder), _MOST_ENTRIES)]
    if close := difflib.get_close_matches(wrong, names, MAX_NAMED):
        return f"; did you mean {_either(str(folder / name) for name in close)}?"
    if re.fullmatch(r"[\w.-]+(:[\w.-]+)?", path.name) and path.suffix != ".gguf":  # as in Ollama
        if file := ollama_models.file_of(path.name):
            return f"; Ollama has a model of that name, which is the file {file}"
        return "; a model of the Hugging Face Hub is named as org/repo, org/repo:Q4_K_M or org/repo:file.gguf"
    return ""


def unfinished(file: Path) -> str | None:
    """Returns why the file is not the whole model, although its size may be right: aria2 creates a file with its final
    size before the bytes arrive, and lists the missing bytes in a second file beside it (NAME.aria2). None if there is
    no such second file beside this file or another part of its split set."""
    for name in split_names(file.name):
        control = file.with_name(name + ".aria2")
        if control.exists():
            said = f"its download is not finished, as {control.name} beside it says"
            return f"{said}: finish it with aria2c -c, or delete that file"
    return None


def for_folder(folder: Path) -> str:
    """Returns a hint for a folder that holds no model: the folders in it that do, or how models of another program's
    folder are named."""
    if repository := _REPOSITORY.fullmatch(folder.name):
        name = f"{repository[1]}/{repository[2]}"
        return f"; a repository of the Hub's cache is named {name}, with HF_HUB_CACHE={folder.parent}"
    if os.path.exists(folder / "adapter_config.json"):
        return "; it is a LoRA adapter: serve its base model, and name the folder with --lora-modules NAME=FOLDER"
    inside = [entry for entry in islice(_entries(folder), _MOST_ENTRIES) if os.path.isdir(entry)]
    if any(_REPOSITORY.fullmatch(entry.name) for entry in inside):
        return f"; it is a cache of the Hub: moeserve list prints the names of its models, with HF_HUB_CACHE={folder}"
    if ollama_models.is_folder(folder):
        return "; Ollama's models are files in it: ollama show --modelfile NAME prints a model's, after FROM"
    models = [entry for entry in inside if _holds_model(entry)]
    if not models:  # as LM Studio's, by publisher and repository
        second = islice(chain.from_iterable(map(_entries, inside)), _MOST_ENTRIES)
        models = [one for one in second if os.path.isdir(one) and _holds_model(one)]
    if not models:
        return ""
    return f"; did you mean {_either(str(entry) for entry in sorted(models)[:MAX_NAMED])}?"


def _holds_model(folder: Path) -> bool:
    return os.path.exists(folder / "config.json") or any(folder.glob("*.gguf"))


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)

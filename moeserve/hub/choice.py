"""Chooses the files of a repository that a model's name selects. Pure functions: from a list of files to file
names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moeserve.models.sources.model_files import is_model_file

from .errors import HubError
from .names import HubName

DEFAULT_TAG = "Q4_K_M"
MAX_LISTED = 40  # files listed in an error message

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
# The files of a folder that `models.sources.huggingface` reads, beside *.safetensors.
FOLDER_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors.index.json",
        "quantize_config.json",
        "hf_quant_config.json",
        "preprocessor_config.json",
        "processor_config.json",
    }
)


@dataclass(frozen=True)
class GGUFSet:
    """One model: a file, or all parts of a split set."""

    stem: str  # the path without part numbers and .gguf
    files: tuple[str, ...]
    parts: int
    bytes: int

    def has_tag(self, tag: str) -> bool:
        """Returns whether the tag is a whole component of the path: Q4_K is not a tag of model-Q4_K_M."""
        return re.search(rf"(?:^|[-./]){re.escape(tag)}(?:$|[-./])", self.stem, re.IGNORECASE) is not None

    def __str__(self) -> str:
        several = f" (the first of {self.parts})" if self.parts > 1 else ""
        return f"{self.bytes / 1e9:8.2f} GB  {self.files[0]}{several}"


def choose(name: HubName, sizes: Mapping[str, int]) -> list[str]:
    """Returns the files to download, the one to open first: a GGUF and the rest of its split set, or config.json and
    the other files of a folder of safetensors.

    `sizes`: bytes of each file of the repository. Raises HubError, which lists the repository's files.
    """
    odd = next((file for file in sizes if not _is_plain(file)), None)
    if odd is not None:
        raise HubError(
            f"{name}: the hub lists the file {odd!r}, which is not a name of a file in a repository; check HF_ENDPOINT"
        )
    sets = gguf_sets(sizes, name.wanted if name.wants_file else None)
    if not sets:
        return _folder(name, sizes)
    chosen = chosen_set(name, sets)
    if len(chosen.files) != chosen.parts:
        raise HubError(
            f"{name}: the repository has only {len(chosen.files)} of the {chosen.parts} parts of {chosen.stem}; choose "
            "another file"
        )
    return list(chosen.files)


def _is_plain(file: str) -> bool:
    """Returns whether the name is safe: a path within the repository, without characters that a terminal would obey."""
    parts = file.split("/")
    return file.isprintable() and "\\" not in file and not {"", ".", ".."} & set(parts)


def chosen_set(name: HubName, sets: list[GGUFSet]) -> GGUFSet:
    """Returns the set of files that the name selects, complete or not. Raises HubError, which lists the sets."""
    if name.wants_file:
        matching = [one for one in sets if name.wanted in one.files]
    elif name.wanted is None and len(sets) == 1:
        return sets[0]
    else:
        matching = [one for one in sets if one.has_tag(name.wanted or DEFAULT_TAG)]
    if len(matching) == 1:
        return matching[0]
    if name.wanted is None:
        problem = "which model is meant? Add a tag, as in :Q8_0, or a file's name. The repository has"
    elif matching:
        problem = f"{name.wanted!r} fits {len(matching)} models; name the file, as in {name.repo}:FILE"
        sets = matching
    else:
        problem = f"nothing fits {name.wanted!r}. The repository has"
    raise HubError(f"{name}: {problem}\n{listing(map(str, sets))}")


def gguf_sets(sizes: Mapping[str, int], wanted: str | None) -> list[GGUFSet]:
    """Returns the models among a repository's files, given the bytes of each file.

    `wanted`: a file that counts as a model whatever its name is; None or a tag: there is no such file.
    """
    found: dict[tuple[str, int], list[str]] = {}
    for file in sorted(sizes):
        if not (is_model_file(file) or file == wanted):
            continue
        match = _PART.fullmatch(file)
        key = (match["stem"], int(match["parts"])) if match else (file.removesuffix(".gguf"), 1)
        found.setdefault(key, []).append(file)
    return [
        GGUFSet(stem, tuple(files), parts, sum(sizes[file] for file in files))
        for (stem, parts), files in found.items()
    ]


def _folder(name: HubName, sizes: Mapping[str, int]) -> list[str]:
    weights = sorted(file for file in sizes if file.endswith(".safetensors") and "/" not in file)
    if name.wanted is None and weights and "config.json" in sizes:
        others = sorted(FOLDER_FILES & sizes.keys() - {"config.json"})
        return ["config.json", *others, *weights]
    problem = "the repository has no .gguf file"
    if name.wanted is None:
        problem += ", nor a config.json with *.safetensors"
    elif weights:
        problem += f", but safetensors: leave out :{name.wanted}"
    files = [f"{size / 1e9:8.2f} GB  {file}" for file, size in sorted(sizes.items())]
    raise HubError(f"{name}: {problem}. It has\n{listing(files)}")


def listing(lines: Iterable[str]) -> str:
    """Returns at most MAX_LISTED of the lines, indented."""
    texts = list(lines)
    more = [f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return "\n".join(f"  {text}" for text in [*texts[:MAX_LISTED], *more])

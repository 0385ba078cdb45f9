"""Says by a file's first bytes why it is no GGUF file. Often something else was saved in a model's place."""

from __future__ import annotations

from pathlib import Path

MAGIC = b"GGUF"
LOOKED_AT = 64  # number of bytes that identify a file's format

_MISTAKEN = (
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file that it stands for, with git lfs pull"),
    (b"<", "a web page or an error in XML: download the file itself, not the page about it"),
    (b"PK\x03\x04", "a PyTorch or zip archive: convert it, or name a folder of safetensors"),
    (b"tjgg", "a file of llama.cpp before August 2023: convert the model again"),
    (
        b'{"schemaVersion"',
        "a manifest of Ollama: ollama show --modelfile NAME prints the model's file, after FROM",
    ),
    (b"\x1f\x8b", "one that gzip compressed: unpack it first, with gunzip"),
    (b"\x28\xb5\x2f\xfd", "one that Zstandard compressed: unpack it first, with unzstd"),
    (b"\xfd7zXZ", "one that xz compressed: unpack it first, with unxz"),
    (b"BZh", "one that bzip2 compressed: unpack it first, with bunzip2"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it first"),
    (bytes(16), "zeros: the download was not finished; download it again"),
)


def not_a_gguf(beginning: bytes) -> str | None:
    """Recognises what a file is. beginning: the file's first LOOKED_AT bytes, or the whole file. Returns what the file
    is instead and what to do, as the end of "this is not a GGUF file"; None if it begins as a GGUF file does, however
    few bytes it has."""
    if MAGIC.startswith(beginning[: len(MAGIC)]):
        return None
    for start, meaning in _MISTAKEN:
        if beginning.lstrip().startswith(start):
            return f"but {meaning}"
    if beginning[8:10] == b'{"' and not any(beginning[5:8]):  # a length of 64 bits, then JSON
        return "but one of safetensors: name the folder that it lies in, with its config.json"
    return f"as it begins with {beginning[:4]!r}, not {MAGIC!r}; download it again"


def what_instead_of_gguf(file: Path) -> str | None:
    """Returns what `not_a_gguf` says of the file. Raises OSError."""
    with file.open("rb") as opened:
        return not_a_gguf(opened.read(LOOKED_AT))

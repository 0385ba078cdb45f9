"""A file's bytes leave the page cache once they are packed, while free memory is short."""

from pathlib import Path

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.models.sources.gguf.file import GGUFFile


def load(path: Path, *, in_place: bool, enough: int) -> tuple[GGUFFile, list[str], list[int]]:
    """Loads the model; free memory is short for more than `enough` bytes. Returns what was dropped, and all bytes that
    were still to be loaded."""
    source, dropped, left = open_gguf(path), list[str](), list[int]()
    source.drop_cached = dropped.append  # type: ignore[method-assign, assignment]

    def is_short(needed: int) -> bool:
        left.append(needed)
        return needed > enough

    CpuLoader(
        CpuStream(1, "plain"), source, read_shape(source), lambda *_: None, in_place, is_short=is_short
    ).load()
    return source, dropped, left


def test_while_memory_is_short(tiny_model: Path) -> None:
    source, dropped, left = load(tiny_model, in_place=False, enough=-1)
    assert sorted(dropped) == sorted(source.tensors)
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    _, some, _ = load(tiny_model, in_place=False, enough=left[len(left) // 2])
    assert some == dropped[: len(left) // 2]
    assert load(tiny_model, in_place=False, enough=left[0])[1] == []


def test_weights_in_the_mapped_file_stay(tiny_model: Path) -> None:
    assert load(tiny_model, in_place=True, enough=-1)[1:] == ([], [])

"""A file whose download broke off is found by its header, in a moment."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import FileError
from moeserve.launcher.short_files import refuse_short_files
from moeserve.models.sources import announced_size
from moeserve.models.sources.announced_size import cut_short
from moeserve.models.sources.gguf import GGUFError, open_gguf
from tests.support.models.gguf_bytes import Tensor, gguf_bytes

FIXTURES = sorted((Path(__file__).resolve().parents[3] / "fixtures").glob("*.gguf"))
METADATA = {"a": 1, "b": "text", "c": ["x", "yz"], "d": [1.0, 2.0], "e": True, "general.alignment": 64}


def gguf(path: Path) -> Path:
    path.write_bytes(gguf_bytes(METADATA, [Tensor("t", (8, 4)), Tensor("u", (64, 3), 8)], alignment=64))
    return path


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_whole_files_pass_and_their_last_bytes_count(file: Path, tmp_path: Path) -> None:
    assert cut_short(file) is None
    short = tmp_path / file.name
    shutil.copy(file, short)
    os.truncate(short, file.stat().st_size - 64)  # the tensors' padding is shorter
    assert (problem := cut_short(short)) is not None
    assert problem.startswith(f"{short}: has ")
    assert problem.endswith(": its download broke off; download it again")


def test_the_last_byte_of_a_file_with_an_alignment_of_its_own(tmp_path: Path) -> None:
    file = gguf(tmp_path / "m.gguf")
    end = announced_size._announced_bytes(file)
    assert end is not None
    os.truncate(file, end)
    assert cut_short(file) is None
    os.truncate(file, end - 1)
    assert f"has {end - 1:,} of {end:,} bytes" in str(cut_short(file))


def test_each_part_of_a_split_set_is_looked_at(tmp_path: Path) -> None:
    first, second = (gguf(tmp_path / f"m-0000{part}-of-00002.gguf") for part in (1, 2))
    assert cut_short(first) is None
    os.truncate(second, second.stat().st_size - 100)
    for model in (first, second, tmp_path):
        assert str(cut_short(model)).startswith(f"{second}: has ")


def safetensors(path: Path, data: int) -> Path:
    entry = {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "t": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))
    return path


def test_each_file_of_a_folder_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "a.safetensors", 40)
    assert cut_short(tmp_path) is None
    short = safetensors(tmp_path / "b.safetensors", 39)
    assert str(cut_short(tmp_path)).startswith(f"{short}: has ")


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "consolidated.safetensors", 3)
    part = safetensors(tmp_path / "a.safetensors", 40)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": "a.safetensors"}}))
    assert cut_short(tmp_path) is None
    os.truncate(part, part.stat().st_size - 1)
    assert str(cut_short(tmp_path)).startswith(f"{part}: has ")


@pytest.mark.parametrize(
    "index",
    ['{"a":' * 100_000, json.dumps({"weight_map": {"t": "x" * 300 + ".safetensors"}}), "[]", "{}"],
    ids=["deeply nested", "a long name", "a list", "without a map"],
)
def test_an_index_that_is_refused_is_left_to_the_reader(index: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors", 3)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert cut_short(tmp_path) is None


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q1sI", 1, b"t", 0),  # a tensor without dimensions
        struct.pack("<Q1sI", 1, b"t", 1 << 31),
        struct.pack("<Q", 1 << 60),  # a name longer than the file
    ],
)
def test_a_damaged_header_is_left_to_the_reader(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + header + bytes(64))
    assert cut_short(file) is None
    alignment = struct.pack("<Q17sII", 17, b"general.alignment", 4, 0)
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + alignment + bytes(64))
    assert cut_short(file) is None


@pytest.mark.parametrize("keep", [0, 3, 20, 30, 90])
def test_a_header_that_is_cut_is_left_to_the_reader(keep: int, tmp_path: Path) -> None:
    file = gguf(tmp_path / "m.gguf")
    os.truncate(file, keep)
    assert cut_short(file) is None
    file = safetensors(tmp_path / "x.safetensors", 40)
    os.truncate(file, keep)
    assert cut_short(file) is None


@pytest.mark.parametrize(
    "tensors",
    [
        [Tensor("t", (8, 4), offset=1 << 43)],
        [Tensor("t", (8, 4), offset=1 << 30), Tensor("u", (8, 4), offset=128)],
        [Tensor("t", (8, 1 << 30), offset=0), Tensor("u", (8, 4), offset=128)],
    ],
    ids=["beyond all files", "an offset", "a dimension"],
)
def test_a_damaged_size_is_no_broken_download(tensors: list[Tensor], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes({}, tensors) + bytes(256))
    assert cut_short(file) is None
    with pytest.raises(GGUFError, match="damaged"):
        open_gguf(file)


def test_ids_count_with_their_bytes(tmp_path: Path) -> None:
    """Counted as less, such a file's tensors would all fit into what is there, and it would pass for damaged."""
    file = tmp_path / "m.gguf"
    ids = Tensor("blk.0.ffn_gate_tid2eid.weight", (8, 64), 26)
    file.write_bytes(gguf_bytes({}, [ids, Tensor("t", (8, 4))]))
    os.truncate(file, announced_size._announced_bytes(file) or 0)
    assert cut_short(file) is None
    os.truncate(file, file.stat().st_size - 100)
    assert "its download broke off" in str(cut_short(file))


def test_a_type_that_is_not_read_is_left_to_the_reader(tmp_path: Path) -> None:
    """Another download would not help."""
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes({}, [Tensor("t", (64, 8)), Tensor("u", (256, 4), 15)])[:-2200])
    assert cut_short(file) is None
    with pytest.raises(GGUFError, match="Q8_K"):
        open_gguf(file)


def test_a_damaged_length_before_no_tensors_is_no_broken_download(tmp_path: Path) -> None:
    """The first part of a split set may have no tensors."""
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes([("k", struct.pack("<IQ", 8, 1 << 30) + b"text")]))
    assert cut_short(file) is None
    with pytest.raises(GGUFError, match=r"'k' takes 1073741824 bytes, .* damaged"):
        open_gguf(file)


def test_who_may_have_a_short_file(tmp_path: Path) -> None:
    short, whole = gguf(tmp_path / "short.gguf"), gguf(tmp_path / "whole.gguf")
    os.truncate(short, short.stat().st_size - 100)
    refuse_short_files(ServerConfig(model=str(whole)))
    refuse_short_files(ServerConfig(model=str(short), load_format="dummy"))
    refuse_short_files(ServerConfig(model=str(short), worker="host:1"))
    for config in (
        ServerConfig(model=str(short)),
        ServerConfig(model=str(whole), mmproj=str(short)),
        ServerConfig(model=str(whole), speculative_model=str(short)),
    ):
        with pytest.raises(FileError, match=r"short\.gguf: has .* download it again"):
            refuse_short_files(config)

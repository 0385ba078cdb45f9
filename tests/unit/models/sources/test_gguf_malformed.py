"""A damaged or hostile GGUF is refused with its cause, at once, and before anything of its size is allocated."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType, GGUFValueType

from moeserve.models.sources.gguf import GGUFError, GGUFFile, open_gguf
from tests.support.models.gguf_bytes import Tensor, gguf_bytes, string, value

Q = GGMLQuantizationType
U32 = struct.Struct("<I")
HUGE = (1 << 64) - 1


def _open(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return open_gguf(path)


def _array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IIQ", GGUFValueType.ARRAY, kind, count) + body


def _with_tensor(*tensors: Tensor) -> bytes:
    return gguf_bytes({}, tensors)


GOOD = gguf_bytes({"a": 1}, [Tensor("t", (8, 4))])

CASES = {
    "not gguf": (b"GGUK" + GOOD[4:], "not a GGUF file as it begins with b'GGUK'"),
    "few bytes": (b"GG", "the header takes 4 bytes, 2 are left: the file is truncated"),
    "archive": (b"PK\x03\x04" + GOOD[4:], "not a GGUF file but a PyTorch or zip archive"),
    "page": (b"\n<!doctype html><html>", "not a GGUF file but a web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "but a Git LFS pointer: fetch"),
    "older format": (b"tjgg\x03\x00\x00\x00", "but a file of llama.cpp before August 2023"),
    "safetensors": (
        struct.pack("<Q", 70_000) + b'{"__metadata__":{',
        "but one of safetensors: name the folder",
    ),
    "gzip": (b"\x1f\x8b\x08\x08" + GOOD, "but one that gzip compressed: unpack it first, with gunzip"),
    "Zstandard": (b"\x28\xb5\x2f\xfd" + GOOD, "but one that Zstandard compressed: unpack it first"),
    "zeros": (bytes(5000), "but zeros: the download was not finished"),
    "version 1": (gguf_bytes({}, version=1), "version 1 is not supported"),
    "big-endian": (gguf_bytes({}, version=3 << 24), "big-endian"),
    "key count": (gguf_bytes({}, num_keys=HUGE), f"announces {HUGE} metadata keys"),
    "tensor count": (gguf_bytes({}, num_tensors=60_000), "announces 60000 tensors"),
    "key length": (
        gguf_bytes([(b"", b"")])[:-8] + struct.pack("<Q", HUGE) + bytes(16),
        "truncated or damaged",
    ),
    "empty key": (gguf_bytes([(b"", value(1))]), "metadata key 0 is 0 bytes long"),
    "key not utf-8": (gguf_bytes([(b"\xff\xfe", value(1))]), "not valid UTF-8"),
    "key twice": (gguf_bytes([("k", value(1)), ("k", value(2))]), "'k' occurs twice"),
    "value type": (gguf_bytes([("k", U32.pack(99) + bytes(8))]), "'k' has the unknown value type 99"),
    "string length": (
        gguf_bytes([("k", U32.pack(8) + struct.pack("<Q", 1 << 40))]),
        "'k' takes 1099511627776",
    ),
    "array length": (gguf_bytes([("k", _array(5, 1 << 40))]), "'k' takes 4398046511104 bytes"),
    "array length overflows": (gguf_bytes([("k", _array(10, 1 << 61))]), "'k' takes 18446744073709551616"),
    "strings count": (gguf_bytes([("k", _array(8, 1 << 40))]), "'k' takes 8796093022208 bytes"),
    "strings run out": (
        gguf_bytes([("k", _array(8, 2, string("a") + struct.pack("<Q", HUGE)))]),
        "truncated",
    ),
    "array type": (gguf_bytes([("k", _array(77, 1, bytes(8)))]), "'k' has the unknown value type 77"),
    "array of arrays": (gguf_bytes([("k", _array(9, 1, _array(9, 1)))]), "'k' is an array of arrays"),
    "alignment": (gguf_bytes({"general.alignment": 48}), "'general.alignment' is 48, a power of two"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}), "'general.alignment' is 0; 8 to"),
    "alignment type": (gguf_bytes({"general.alignment": "32"}), "'general.alignment' is '32', an integer"),
    "tensor twice": (_with_tensor(Tensor("t", (8,)), Tensor("t", (8,))), "tensor 't' occurs twice"),
    "tensor name": (_with_tensor(Tensor("t" * 65, (8,))), "65 bytes long; 1 to 64"),
    "rank 0": (_with_tensor(Tensor("t", ())), "tensor 't' has 0 dimensions"),
    "rank 5": (_with_tensor(Tensor("t", (1, 1, 1, 1, 1))), "tensor 't' has 5 dimensions"),
    "rank absurd": (
        GOOD.replace(string("t") + U32.pack(2), string("t") + U32.pack(1 << 31)),
        "2147483648 dim",
    ),
    "dimension 0": (_with_tensor(Tensor("t", (8, 0))), "tensor 't' has an empty dimension"),
    "dimensions": (
        _with_tensor(Tensor("t", (1 << 40, 4), offset=0)),
        "'t' of shape [4, 1099511627776] and type F32",
    ),
    "product overflows": (
        _with_tensor(Tensor("t", (1 << 32, 1 << 32, 1 << 32, 4), offset=0)),
        "would take 1267650600228229401496703205376 bytes",
    ),
    "unsupported type": (
        _with_tensor(Tensor("t", (256,), Q.Q8_K)),
        "'t' is of type Q8_K (llama.cpp's, number 15), which is not supported; download a file of Q8_0 instead",
    ),
    "type of another program": (
        _with_tensor(Tensor("t", (256,), 144)),
        "'t' is of type IQ4_KS (ik_llama.cpp's own, number 144), which is not supported; download a file of IQ4_XS",
    ),
    "removed type": (
        _with_tensor(Tensor("t", (256,), 31)),
        "'t' is of type Q4_0_4_4 (repacked for one kind of CPU and removed from llama.cpp, number 31), which is not",
    ),
    "integers": (
        _with_tensor(Tensor("t", (256,), 26)),
        "'t' is of type I32 (llama.cpp's, number 26), which is not supported; supported are F32",
    ),
    "unknown type": (_with_tensor(Tensor("t", (256,), 4000)), "'t' is of type number 4000, which is not"),
    "half a block": (
        _with_tensor(Tensor("t", (40, 2), Q.Q8_0)),
        "'t' has rows of 40 values; Q8_0 needs a mul",
    ),
    "unaligned": (_with_tensor(Tensor("t", (8,), offset=4)), "'t' begins at 4, which is not a multiple of"),
    "past the end": (_with_tensor(Tensor("t", (8,), offset=1 << 20)), "'t' ends at byte"),
    "offset overflows": (
        _with_tensor(Tensor("t", (8,), offset=HUGE - 31)),
        "'t' ends at byte 18446744073709551",
    ),
    "overlap": (
        _with_tensor(Tensor("t", (64,)), Tensor("u", (8,), offset=32)),
        "'u' begins at byte 128, inside",
    ),
}


@pytest.mark.parametrize(("content", "cause"), CASES.values(), ids=CASES.keys())
def test_refused_with_its_cause_and_without_allocating(tmp_path: Path, content: bytes, cause: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            _open(tmp_path, content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cause in str(caught.value)
    assert str(tmp_path / "model.gguf") in str(caught.value)
    assert peak < 1 << 20


def _sample() -> bytes:
    """A small file with every kind of metadata value and a few tensors."""
    metadata = {
        "general.architecture": "qwen3moe",
        "int": 7,
        "float": 0.5,
        "bool": True,
        "ints": [1, 2, 3],
        "bools": [True, False],
        "strings": ["", "a", "länger"],
        "general.alignment": 32,
    }
    return gguf_bytes(
        metadata, [Tensor("q", (64, 3), Q.Q8_0), Tensor("f", (5,)), Tensor("e", (256, 2, 2), Q.Q4_K)]
    )


def _use(file: GGUFFile) -> None:
    """Touches everything a caller may touch."""
    for value_ in file.metadata.values():
        if not isinstance(value_, int | float | str):
            list(value_)
    for name in file.tensors:
        file.data(name).sum()
        file.advise_done(name)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = _sample()
    _use(_open(tmp_path, whole))
    padding = max(i.offset + i.nbytes for i in _open(tmp_path, whole).tensors.values())
    for size in range(padding):
        with pytest.raises(GGUFError, match=r"truncated|damaged|empty"):
            _open(tmp_path, whole[:size])


@pytest.mark.parametrize("cases", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_flipped_bytes_end_in_a_gguf_error_or_in_a_usable_file(tmp_path: Path, cases: int) -> None:
    whole = _sample()
    header_bytes = min(i.offset for i in _open(tmp_path, whole).tensors.values())
    generator = random.Random(20250711)
    refused = 0
    tracemalloc.start()
    slowest = 0.0
    for _ in range(cases):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 8))):
            replacement = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
            damaged[generator.randrange(header_bytes)] = replacement
        start = time.thread_time()
        try:
            _use(_open(tmp_path, bytes(damaged)))
        except GGUFError:
            refused += 1
        slowest = max(slowest, time.thread_time() - start)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > cases // 3
    assert slowest < 1.0
    assert peak < 4 << 20


def test_metadata_getters_name_the_key_and_the_range(tmp_path: Path) -> None:
    metadata = _open(
        tmp_path, gguf_bytes({"i": 7, "f": float("nan"), "s": "x", "b": True, "l": [1, 2]})
    ).metadata
    for call, cause in (
        (lambda: metadata.require_int("i", 8, 9), "'i' is 7; 8 to 9 is supported"),
        (lambda: metadata.require_int("b", 0, 9), "'b' is True, an integer is expected"),
        (lambda: metadata.require_int("gone", 0, 9), "'gone' is missing"),
        (lambda: metadata.require_float("f", 0.0, 1.0), "'f' is nan; 0.0 to 1.0"),
        (lambda: metadata.require_str("i"), "'i' is 7, a string is expected"),
        (lambda: metadata.require_bool("s"), "'s' is 'x', a boolean is expected"),
        (lambda: metadata.require_strings("l"), "'l' is an array of 2 int32, an array of strings"),
        (lambda: metadata.require_ints("l", 3), "'l' has 2 entries, 3 are expected"),
    ):
        with pytest.raises(GGUFError) as caught:
            call()
        assert cause in str(caught.value)
    assert metadata.require_int("gone", 0, 9, default=3) == 3
    assert metadata.require_float("i", 0.0, 9.0) == 7.0

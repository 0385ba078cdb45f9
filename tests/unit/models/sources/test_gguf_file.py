"""Opening a GGUF: what gguf-py sees, we see; split sets, folders, mapped pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFValueType

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf import GGUFError, StringArray, open_gguf
from moeserve.models.sources.gguf.value_types import ValueType
from moeserve.models.sources.regular_file import FileVersion, drop_cached
from tests.support.models.gguf_bytes import Tensor, gguf_bytes


def test_tensors_are_those_that_gguf_py_reads(tiny_model: Path) -> None:
    ours = open_gguf(tiny_model)
    theirs = gguf.GGUFReader(tiny_model)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(dimension) for dimension in tensor.shape[::-1])
        assert (int(info.type), info.nbytes, info.part) == (tensor.tensor_type, int(tensor.n_bytes), 0)
        np.testing.assert_array_equal(ours.data(tensor.name), tensor.data.reshape(-1).view(np.uint8))
    assert ours.file_bytes == tiny_model.stat().st_size


def test_metadata_is_what_gguf_py_reads(tiny_model: Path) -> None:
    ours = open_gguf(tiny_model).metadata
    theirs = {k: f for k, f in gguf.GGUFReader(tiny_model).fields.items() if not k.startswith("GGUF.")}
    assert list(ours) == list(theirs)
    for key, field in theirs.items():
        value = ours[key]
        if isinstance(value, StringArray):
            assert [item.decode() for item in value] == field.contents(), key
        elif isinstance(value, np.ndarray):
            assert value.tolist() == field.contents(), key
        else:
            assert value == field.contents(), key
            assert type(value) is type(field.contents()), key


def test_an_expert_is_a_contiguous_stretch_of_out_times_in(tmp_path: Path) -> None:
    """[experts, out, in] with three different numbers, in a block-quantised type."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, [Tensor("e", (64, 5, 3), gguf.GGMLQuantizationType.Q8_0)]))
    file = open_gguf(path)
    info = file.tensors["e"]
    assert (info.shape, info.nbytes) == ((3, 5, 64), 3 * 5 * 2 * 34)
    experts = file.data("e").reshape(3, 5, -1)
    reference = gguf.quants.dequantize(gguf.GGUFReader(path).tensors[0].data, gguf.GGMLQuantizationType.Q8_0)
    assert reference.shape == (3, 5, 64)
    np.testing.assert_array_equal(
        gguf.quants.dequantize(experts[2], gguf.GGMLQuantizationType.Q8_0), reference[2]
    )


def test_data_is_read_only_and_outlives_the_file_object(tiny_model: Path) -> None:
    data = open_gguf(tiny_model).data("output_norm.weight")
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    assert np.isfinite(data.view(np.float32)).all()


def test_advise_done_gives_the_pages_back_and_keeps_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    header = gguf_bytes({}, [Tensor("big", (1 << 20, 8))])[: 1 << 12]
    path.write_bytes(header + np.random.default_rng(0).bytes((32 << 20) + 4096 - len(header)))
    file = open_gguf(path)
    total = int(file.data("big").sum(dtype=np.int64))
    before = _resident_bytes(path)
    file.advise_done("big")
    assert before > 30 << 20
    assert _resident_bytes(path) < 1 << 20
    assert int(file.data("big").sum(dtype=np.int64)) == total


def _resident_bytes(path: Path) -> int:
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def _write_split_set(folder: Path, parts: int = 3, stem: str = "model") -> list[Path]:
    paths = []
    for part in range(parts):
        metadata = {"split.no": part, "split.count": parts, "split.tensors.count": parts}
        if part == 0:
            metadata |= {"general.architecture": "qwen3moe"}  # type: ignore[dict-item]
        path = folder / f"{stem}-{part + 1:05d}-of-{parts:05d}.gguf"
        path.write_bytes(gguf_bytes(metadata, [Tensor(f"t{part}", (8 * (part + 1),))]))
        paths.append(path)
    return paths


@pytest.mark.parametrize("named", [0, 1, 2, None])
def test_split_set_opens_from_any_part_and_from_its_folder(tmp_path: Path, named: int | None) -> None:
    paths = _write_split_set(tmp_path)
    file = open_gguf(tmp_path if named is None else paths[named])
    assert {name: info.part for name, info in file.tensors.items()} == {"t0": 0, "t1": 1, "t2": 2}
    assert file.architecture == "qwen3moe"  # the first part's metadata, whichever was named
    assert [len(file.data(f"t{i}")) for i in range(3)] == [32, 64, 96]
    assert file.file_bytes == sum(path.stat().st_size for path in paths)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = _write_split_set(tmp_path)
    paths[1].unlink()
    with pytest.raises(GGUFError, match=r"1 of the 3 files .* missing: model-00002-of-00003\.gguf"):
        open_gguf(paths[0])


def test_renamed_part_is_refused(tmp_path: Path) -> None:
    paths = _write_split_set(tmp_path)
    shutil.copy(paths[1], paths[2])
    with pytest.raises(GGUFError, match="makes it part 2 of 3, its name part 3 of 3"):
        open_gguf(paths[0])
    alone = paths[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(GGUFError, match="makes it part 1 of 3, its name part 1 of 1"):
        open_gguf(alone)


def test_folder_with_several_models_lists_them(tmp_path: Path) -> None:
    _write_split_set(tmp_path, stem="big")
    (tmp_path / "small.gguf").write_bytes(gguf_bytes({}))
    with pytest.raises(GGUFError, match=r"2 models; name one of them: big-00001-of-00003\.gguf, small\.gguf"):
        open_gguf(tmp_path)


@pytest.mark.parametrize(
    "beside",
    [
        *(
            "mmproj-F16.gguf",
            "mmproj-model-f16.gguf",
            "Qwen3.5-35B-mmproj.gguf",
            "MMPROJ.gguf",
            "a-mmprojBF16.gguf",
        ),
        *("m.imatrix.gguf", "imatrix_unsloth.gguf", "Qwen3.5-35B-F16-LoRA.gguf", "Qwen3.5-35B-vocab.gguf"),
    ],
)
def test_a_projector_beside_the_model_is_no_model(tmp_path: Path, beside: str) -> None:
    _write_split_set(tmp_path, stem="big")
    (tmp_path / beside).write_bytes(gguf_bytes({}))
    assert open_gguf(tmp_path).path.name == "big-00001-of-00003.gguf"


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"holds no \.gguf file"):
        open_gguf(tmp_path)
    with pytest.raises(GGUFError, match="No such file"):
        open_gguf(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(GGUFError, match="is empty"):
        open_gguf(tmp_path / "empty.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        open_gguf(Path("/dev/null"))


def test_a_file_without_a_suffix_has_a_gguf_files_remedy(tmp_path: Path) -> None:
    """As Ollama's blobs."""
    file = tmp_path / "sha256-0123"
    file.write_bytes(gguf_bytes({}))
    with pytest.raises(GGUFError, match=r"general\.architecture.* is missing; convert the model again"):
        assert open_gguf(file).architecture
    assert "convert the model again" in str(SettingError(file, "has a setting"))
    for of_folder in (tmp_path, tmp_path / "config.json"):
        assert "another checkpoint" in str(SettingError(of_folder, "has a setting"))


def test_a_full_vocabulary_opens_in_a_fraction_of_a_second(wide_fixtures: Path) -> None:
    """Three processes open the file at every start; gguf-py takes 5.6 s for this one."""
    path = wide_fixtures / "tokenizer" / "qwen2-vocab.gguf"
    start = time.thread_time()
    file = open_gguf(path)
    assert time.thread_time() - start < 0.5  # 0.02 s when the machine is idle
    assert len(file.metadata.require_strings("tokenizer.ggml.tokens")) == 151_936


def test_value_types_are_gguf_pys() -> None:
    assert {kind.name: kind.value for kind in ValueType} == {kind.name: kind.value for kind in GGUFValueType}


@pytest.mark.parametrize("was_short", [True, False])
def test_dropped_bytes_leave_the_page_cache_and_are_read_again(tmp_path: Path, was_short: bool) -> None:
    """Both halves of a merged tensor, but not after the first; also if memory became short only after the first."""
    path = tmp_path / "m.gguf"
    merged = Tensor("blk.0.ffn_gate_up_exps.weight", (1024, 2, 1024))
    header = gguf_bytes({}, [merged])[: 1 << 12]
    with path.open("wb") as written:
        written.write(header + np.random.default_rng(0).bytes((8 << 20) + 4096 - len(header)))
        os.fsync(written.fileno())  # pages that are not written yet stay
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _cached_bytes(path) > 4 << 20:
        pytest.skip("this file system keeps its files in memory")
    file = open_gguf(path)
    gate, up = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"
    total = int(file.data(up).sum(dtype=np.int64))
    before = _cached_bytes(path)
    file.advise_done(gate)
    if was_short:
        file.drop_cached(gate)
    assert _cached_bytes(path) == before > 7 << 20
    file.advise_done(up)
    file.drop_cached(up)
    assert _cached_bytes(path) < before // 2  # large pages at the ends stay
    assert int(file.data(up).sum(dtype=np.int64)) == total


def test_another_file_of_the_path_is_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"a" * (1 << 20))
    version = FileVersion.of(path)
    path.unlink()
    drop_cached(path, version, 0, 1 << 20)  # there is none
    with path.open("wb") as written:
        written.write(b"b" * (1 << 20))
        os.fsync(written.fileno())
    before = _cached_bytes(path)
    drop_cached(path, version, 0, 1 << 20)
    assert _cached_bytes(path) == before > 0


def _cached_bytes(path: Path) -> int:
    """Returns the bytes of the file in the page cache: mincore(2) of a mapping whose pages were not touched."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = np.frombuffer(mapped, np.uint8)
        pages = (ctypes.c_ubyte * -(-len(whole) // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(whole)), pages) == 0
        del whole
    return mmap.PAGESIZE * sum(page & 1 for page in pages)

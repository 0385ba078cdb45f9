"""Opens a model: a GGUF file, a split set, or a folder with one. Weights stay memory-mapped."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.sources.experts_in_file import ExpertsInFile
from moeserve.models.sources.model_files import SPLIT_NAME, listed, models_of, split_names
from moeserve.models.sources.regular_file import FileVersion, drop_cached, map_version
from moeserve.models.sources.row_places import RowPlaces

from .errors import GGUFError
from .fused_ffn import gate_and_up
from .fused_qkv import divided
from .header import Header, MappedTensor, read_header
from .merged_experts import separated
from .metadata import Metadata


class GGUFFile:
    """A model's checked header and mapped tensors: a ModelSource. Everything is validated on construction.

    The mappings are read-only, shared between processes that open the same file, and last as long as this object or
    any array from `data`.
    """

    def __init__(
        self,
        paths: list[Path],
        buffers: list[mmap.mmap],
        versions: list[FileVersion],
        headers: list[Header],
    ) -> None:
        self.path = paths[0]  # the only file, or the first of the split set
        self.metadata: Metadata = headers[0].metadata
        self.tensors: dict[str, MappedTensor] = {}
        self.file_bytes = sum(len(buffer) for buffer in buffers)
        self._buffers, self._paths, self._versions = buffers, paths, versions
        self._sparsely_read: set[str] = set()
        self._halves_done: set[tuple[int, int, int]] = set()  # part, offset and half of merged tensors
        for path, header in zip(paths, headers, strict=True):
            for tensor in _presented(header.tensors, self.metadata):
                if tensor.name in self.tensors:
                    raise GGUFError(
                        path,
                        f"tensor {tensor.name!r} occurs twice, or in two parts of the split set; download it "
                        "again",
                    )
                self.tensors[tensor.name] = tensor
        self.is_mapped = all(tensor.half is None for tensor in self.tensors.values())

    @property
    def skipped(self) -> Mapping[str, int]:
        """Empty: `tensors` includes all tensors."""
        return {}

    @property
    def missing_bytes(self) -> int:
        """Bytes of tensors behind the files' ends: 0 but for files that were opened without their tensors."""
        ends = [len(buffer) for buffer in self._buffers]
        for tensor in self.tensors.values():
            ends[tensor.part] = max(ends[tensor.part], tensor.offset + _stored_bytes(tensor))
        return sum(ends) - self.file_bytes

    @property
    def architecture(self) -> str:
        return self.metadata.require_str("general.architecture")

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the tensor's bytes as stored: uint8 [nbytes], a read-only view, or a copy for half a merged
        tensor. Raises KeyError if absent."""
        tensor = self.tensors[name]
        stored = np.frombuffer(self._buffers[tensor.part], np.uint8, _stored_bytes(tensor), tensor.offset)
        if tensor.half is None:
            return stored
        return stored.reshape(tensor.shape[0], 2, -1)[:, tensor.half].reshape(-1)

    def rows(
        self, name: str, rows: np.ndarray[Any, np.dtype[np.int64]]
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns a copy of some rows of a matrix: uint8 [n, bytes of a row]. The system reads only these rows' pages
        of the file. Raises KeyError if the tensor is absent."""
        self._read_sparsely(name)
        return np.take(self.data(name).reshape(self.tensors[name].shape[0], -1), rows, axis=0)

    def row_places(self, name: str) -> RowPlaces | None:
        """See ModelSource."""
        tensor = self.tensors[name]
        if tensor.half is not None:
            return None
        self._read_sparsely(name)
        return RowPlaces.of(self.data(name).reshape(tensor.shape[0], -1))

    def _read_sparsely(self, name: str) -> None:
        """Switches read-ahead off, because the rows are scattered."""
        if name in self._sparsely_read:
            return
        self._sparsely_read.add(name)
        tensor = self.tensors[name]
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._buffers[tensor.part].madvise(mmap.MADV_RANDOM, start, tensor.offset + tensor.nbytes - start)

    def files_of(self, name: str) -> dict[Path, FileVersion]:
        """See ModelSource."""
        part = self.tensors[name].part
        return {self._paths[part]: self._versions[part]}

    def experts_in_file(self, name: str) -> ExpertsInFile | None:
        tensor = self.tensors[name]
        stride, half = _stored_bytes(tensor) // tensor.shape[0], tensor.half or 0
        offset = tensor.offset + half * (tensor.nbytes // tensor.shape[0])
        return ExpertsInFile(self._paths[tensor.part], self._versions[tensor.part], offset, stride)

    def advise_done(self, name: str) -> None:
        """Releases the tensor's mapped pages, except those shared with a neighbour.

        The bytes stay readable, from the page cache or the disk, but no longer count as this process's memory.
        """
        tensor = self.tensors[name]
        if tensor.half is not None:
            self._halves_done.add((tensor.part, tensor.offset, tensor.half))
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + _stored_bytes(tensor)) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            self._buffers[tensor.part].madvise(mmap.MADV_DONTNEED, start, end - start)

    def drop_cached(self, name: str) -> None:
        """See ModelSource. A merged tensor's bytes are removed only when both halves are done (`advise_done`)."""
        tensor = self.tensors[name]
        part = tensor.part
        if tensor.half is not None and (part, tensor.offset, 1 - tensor.half) not in self._halves_done:
            return
        end = tensor.offset + _stored_bytes(tensor)
        drop_cached(self._paths[part], self._versions[part], tensor.offset, end)


def open_gguf(path: Path, *, has_tensors: bool = True) -> GGUFFile:
    """Maps a .gguf file, any file of a split set, or a folder with one model, checks its headers, and returns it.
    has_tensors False: the file may be truncated after its header; its tensors' bytes must then not be read.

    Raises GGUFError for a file that is missing, damaged or of another format.
    """
    if path.is_dir():
        path = _only_model_in(path)
    paths = split_set(path)
    mapped = [_map(part) for part in paths]
    buffers, versions = [buffer for buffer, _ in mapped], [version for _, version in mapped]
    headers = [
        read_header(part, buffer, i, has_tensors=has_tensors)
        for i, (part, buffer) in enumerate(zip(paths, buffers, strict=True))
    ]
    _check_split(paths, headers)
    return GGUFFile(paths, buffers, versions, headers)


def _presented(tensors: Iterable[MappedTensor], metadata: Metadata) -> Iterator[MappedTensor]:
    """Yields a file's tensors, each under its usual name and in its usual form."""
    return divided(gate_and_up(separated(tensors), metadata), metadata)


def _stored_bytes(tensor: MappedTensor) -> int:
    """Returns the tensor's size in bytes in the file; for half of a merged tensor, the size of the merged tensor."""
    return tensor.nbytes if tensor.half is None else 2 * tensor.nbytes


def _map(path: Path) -> tuple[mmap.mmap, FileVersion]:
    try:
        return map_version(path)
    except OSError as error:
        raise GGUFError(
            path, f"cannot be opened: {error.strerror or error}; let the server's user read it"
        ) from error


def _only_model_in(folder: Path) -> Path:
    models = models_of(entry.name for entry in folder.glob("*.gguf"))
    if not models:
        raise GGUFError(folder, "the folder holds no .gguf file")
    if len(models) > 1:
        raise GGUFError(folder, f"the folder holds {len(models)} models; name one of them: {listed(models)}")
    return folder / models[0]


def split_set(path: Path) -> list[Path]:
    """Returns all files of the split set that `path`'s name belongs to; only `path` if none."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    parts = int(match["parts"])
    if not 1 <= int(match["part"]) <= parts:
        raise GGUFError(
            path,
            f"is named as part {int(match['part'])} of {parts}; that is impossible: give it its published name",
        )
    paths = [path.with_name(name) for name in split_names(path.name)]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise GGUFError(
            path,
            f"{len(missing)} of the {parts} files of this split set are missing: {listed(missing)}; download "
            "them to the same folder",
        )
    return paths


def _check_split(paths: list[Path], headers: list[Header]) -> None:
    """Checks that the parts' headers agree with their names."""
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        metadata = header.metadata
        count = metadata.require_int("split.count", 0, 99_999, default=1) or 1
        number = metadata.require_int("split.no", 0, 99_998, default=0)
        if (number, count) != (index, len(paths)):
            raise GGUFError(
                path,
                f"its metadata makes it part {number + 1} of {count}, its name part {index + 1} of "
                f"{len(paths)}; give the files of the split set the names they were published under, do not join "
                "them, and name the first part as the model",
            )
    total = sum(len(header.tensors) for header in headers)
    announced = headers[0].metadata.require_int("split.tensors.count", 0, 1 << 31, default=total)
    if announced != total:
        raise GGUFError(
            paths[0], f"the split set announces {announced} tensors and holds {total}; download it again"
        )

"""An embedding table that a checkpoint stores as several tensors, because it is too large for one or for RAM:

    <under>.shard_0.weight, <under>.shard_1.weight, ...   rows in the order of the numbers; floats, or 8-bit floats
    <under>.weight_scale                                  of 8-bit floats: one scale for all

`MadeTensor.take` reads single rows; the table is never in RAM as a whole."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.row_places import RowPlaces
from moeserve.quantization.table import FP8_TYPES

from .fp8_blocks import is_shard, scale_values
from .made_tensor import Bytes, MadeTensor, find_part
from .safetensors_file import FP8, TYPES, StoredTensor, stored_bytes, stored_numbers

Int64s = npt.NDArray[np.int64]
_NGRAMS = "ple.ple_embedding."  # prefix after "model.layers.N."
# The hashes' numbers that checkpoints state beside a table of n-grams, int64: names after _NGRAMS, and keys of the
# metadata, after the architecture, that have the numbers that follow from the settings.
_STATED = {
    "layer_multipliers": "ple.layer_multipliers",
    "ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
    "ngram_heads_offsets": "ple.head_offsets",
}


def ngram_table(
    path: Path, metadata: Metadata, stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, MadeTensor]]:
    """Yields the table of n-gram embeddings, for `HuggingFaceMapping.made_outside`. Raises ModelError if the numbers
    beside it are not the settings' ones."""
    architecture = metadata.require_str("general.architecture")
    (layer,) = metadata.require_ints(f"{architecture}.ple.layers", 1)
    under = f"model.layers.{layer}.{_NGRAMS}"
    for theirs, ours in _STATED.items():
        if under + theirs not in stored:
            continue
        stated = find_part(path, stored, under + theirs, ("I64",), 1)
        expected = metadata[f"{architecture}.{ours}"]
        if not np.array_equal(stored_numbers(stated).view(np.int64), np.asarray(expected)):
            raise SettingError(
                path,
                f"tensor {stated.name!r} has other numbers than follow from config.json's seed and sizes; other hashes "
                "of n-grams are not supported",
            )
        del stored[stated.name]
    for table in sharded_table(path, stored, f"{under}ngram_embedding"):
        yield n.LAYER_INPUT_EMBD, table


def sharded_table(path: Path, stored: dict[str, StoredTensor], under: str) -> Iterator[MadeTensor]:
    """Yields the table if the checkpoint has it, and removes its parts from `stored`. under: the names' beginning.
    Raises ModelError for parts that do not fit one another."""
    first = f"{under}.shard_0.weight"
    if first not in stored:
        return
    names = _names(path, stored, under)
    kind = stored[first].dtype
    shards = [find_part(path, stored, name, (kind,)) for name in names]
    cols = shards[0].shape[1]
    narrow = next((shard for shard in shards if shard.shape[1] != cols), None)
    if narrow is not None:
        raise ModelError(
            path,
            f"tensor {narrow.name!r} has {narrow.shape[1]} columns, {first!r} has {cols}; download it again",
        )
    scale = (
        find_part(path, stored, f"{under}.weight_scale", ("F32", "BF16", "F16"), 1) if kind == FP8 else None
    )
    for tensor in (*shards, *(() if scale is None else (scale,))):
        del stored[tensor.name]
    yield _Table(path, shards, scale).made()


def _names(path: Path, stored: dict[str, StoredTensor], under: str) -> list[str]:
    found = [name for name in stored if name.startswith(under) and is_shard(name)]
    names = [f"{under}.shard_{index}.weight" for index in range(len(found))]
    missing = next((name for name in names if name not in stored), None)
    if missing is not None:
        raise ModelError(path, f"tensor {missing!r} is missing; download the whole repository")
    return names


class _Table:
    """Reads rows of the shards."""

    def __init__(self, path: Path, shards: list[StoredTensor], scale: StoredTensor | None) -> None:
        self._shards = shards
        self._sources = tuple(shards) if scale is None else (*shards, scale)
        self._firsts = np.array([0, *accumulate(shard.shape[0] for shard in shards)], np.int64)
        self._cols = shards[0].shape[1]
        self._is_advised = False
        if scale is None:
            if shards[0].dtype not in TYPES:
                raise SettingError(
                    path,
                    f"tensor {shards[0].name!r} is of type {shards[0].dtype}; a table in parts is of "
                    f"{', '.join(TYPES)}, or of {FP8} with one scale",
                )
            self._type = TYPES[shards[0].dtype]
            return
        if math.prod(scale.shape) != 1:
            raise SettingError(
                path, f"tensor {scale.name!r} has shape {list(scale.shape)}; one number is expected"
            )
        width = next((each for each in sorted(FP8_TYPES, reverse=True) if self._cols % each == 0), None)
        if width is None:
            raise SettingError(
                path,
                f"tensor {shards[0].name!r} has {self._cols} columns; of {FP8} a multiple of {min(FP8_TYPES)} is "
                "supported",
            )
        self._type = FP8_TYPES[width]
        self._scale = scale_values(scale).reshape(1)

    def made(self) -> MadeTensor:
        rows = int(self._firsts[-1])
        return MadeTensor(
            (rows, self._cols),
            self._type,
            self._sources,
            lambda: self.take(np.arange(rows)).reshape(-1),
            take=self.take,
            places=self.places,
        )

    def take(self, rows: Int64s) -> Bytes:
        """Returns these rows' bytes, uint8 [n, bytes of a row]."""
        self._advise()
        shard_of = np.searchsorted(self._firsts, rows, side="right") - 1
        out = np.empty((len(rows), self._type.row_bytes(self._cols)), np.uint8)
        for index in np.unique(shard_of):
            here = shard_of == index
            out[here] = self._blocks(stored_numbers(self._shards[index])[rows[here] - self._firsts[index]])
        return out

    def places(self) -> RowPlaces:
        """Returns where the shards' rows are."""
        self._advise()
        places = RowPlaces.of(*(stored_bytes(shard) for shard in self._shards))
        if self._type.block_columns == 1:
            return places
        return places.scaled(self._type.block_columns, float(self._scale[0]))

    def _blocks(self, numbers: npt.NDArray[Any]) -> Bytes:
        if self._type.block_columns == 1:
            return np.ascontiguousarray(numbers).view(np.uint8)
        width = self._type.block_columns
        blocks = np.empty((len(numbers), self._cols // width, self._type.block_bytes), np.uint8)
        blocks[..., :4] = self._scale.view(np.uint8)
        blocks[..., 4:] = numbers.reshape(len(numbers), -1, width)
        return blocks.reshape(len(numbers), -1)

    def _advise(self) -> None:
        """Switches read-ahead off, because the rows are scattered."""
        if self._is_advised:
            return
        self._is_advised = True
        for shard in self._shards:
            start = shard.start // mmap.PAGESIZE * mmap.PAGESIZE
            shard.buffer.madvise(mmap.MADV_RANDOM, start, shard.end - start)

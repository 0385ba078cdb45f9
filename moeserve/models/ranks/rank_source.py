"""A model source that shows one rank its share of each tensor, under the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.ranks.rank_share import RankShare, TensorSlice
from moeserve.models.sources.gguf import Metadata, TensorInfo
from moeserve.models.sources.regular_file import FileVersion
from moeserve.models.sources.row_places import RowPlaces
from moeserve.models.sources.source import ModelSource

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class RankSource:
    """A `ModelSource` of `share.shape`. Routed experts' tensors are whole; the loader picks its experts."""

    def __init__(self, source: ModelSource, share: RankShare) -> None:
        self._source = source
        self._share = share
        self._tensors = {
            own: replace(_sliced(tensor, share.slices.get(name)), name=own)
            for name, tensor in source.tensors.items()
            if name not in share.absent and (own := share.name_in_share(name)) is not None
        }

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def metadata(self) -> Metadata:
        return self._source.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def skipped(self) -> Mapping[str, int]:
        return self._source.skipped

    @property
    def file_bytes(self) -> int:
        return self._source.file_bytes

    @property
    def is_mapped(self) -> bool:
        return False

    @property
    def architecture(self) -> str:
        return self._source.architecture

    def data(self, name: str) -> Bytes:
        name = self._share.name_in_model(name)
        data = self._source.data(name)
        if name in self._share.zeroed:
            return np.zeros_like(data)
        cut = self._share.slices.get(name)
        if cut is None:
            return data
        tensor = self._source.tensors[name]
        rows = data.reshape(tensor.shape[0], -1)
        if not cut.is_columns:
            return rows[cut.start : cut.end].reshape(-1)
        first, end = (tensor.type.row_bytes(column) for column in (cut.start, cut.end))
        return np.ascontiguousarray(rows[:, first:end]).reshape(-1)

    def rows(self, name: str, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Bytes:
        """See ModelSource. Only for tensors that every rank has whole."""
        return self._source.rows(self._share.name_in_model(name), rows)

    def row_places(self, name: str) -> RowPlaces | None:
        """See ModelSource. Only for tensors that every rank has whole."""
        return self._source.row_places(self._share.name_in_model(name))

    def files_of(self, name: str) -> Mapping[Path, FileVersion]:
        """See ModelSource."""
        return self._source.files_of(self._share.name_in_model(name))

    def experts_in_file(self, name: str) -> None:
        """Returns None, because a rank's share of an expert is not contiguous in the file."""

    def advise_done(self, name: str) -> None:
        self._source.advise_done(self._share.name_in_model(name))

    def drop_cached(self, name: str) -> None:
        """Does nothing: other ranks read the tensor, too."""


def _sliced(tensor: TensorInfo, cut: TensorSlice | None) -> TensorInfo:
    if cut is None:
        return tensor
    size = cut.end - cut.start
    shape = (*tensor.shape[:-1], size) if cut.is_columns else (size, *tensor.shape[1:])
    if len(shape) == 1:
        return TensorInfo(tensor.name, shape, tensor.type, tensor.nbytes // tensor.shape[0] * size)
    return TensorInfo(tensor.name, shape, tensor.type, prod(shape[:-1]) * tensor.type.row_bytes(shape[-1]))

"""Multipliers of activations that a checkpoint states as numbers and a GGUF has as part of the weights: they are
multiplied into the matrices before or after the activations, and the results are rounded to the stored type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeserve.models.sources.gguf import Metadata
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.gguf.metadata import MetadataValue

from .made_tensor import MadeTensor, scaled_rows
from .remade import Made
from .safetensors_file import StoredTensor


def multiplier_keys(
    part: str, factors: Sequence[float], rows: Sequence[int] = ()
) -> dict[str, MetadataValue]:
    """Returns the metadata, under keys that no GGUF has, by which `multiplied` knows a matrix's factors. rows: for each
    factor but the last, the number of consecutive rows that it multiplies; the last one multiplies the remaining
    rows."""
    return {
        f"multipliers.{part}": np.array(factors, np.float32),
        f"multipliers.{part}.rows": np.array(rows, np.int64),
    }


def multiplied(names: Mapping[str, str]) -> Made:
    """Returns a function that yields the matrices whose factors are not all 1, with their rows multiplied by the
    factors, and removes them from `stored`. names: GGUF parts -> names after "model.layers.N."."""

    def made(
        path: Path, prefix: str, metadata: Metadata, stored: dict[str, StoredTensor]
    ) -> Iterator[tuple[str, MadeTensor]]:
        architecture = metadata.require_str("general.architecture")
        for part, theirs in names.items():
            tensor = stored.get(prefix + theirs)
            factors, rows = (metadata[f"{architecture}.multipliers.{part}{end}"] for end in ("", ".rows"))
            assert isinstance(factors, np.ndarray)
            assert isinstance(rows, np.ndarray)
            if tensor is not None and len(tensor.shape) == 2 and (factors != 1.0).any():
                of_rows = _by_row(factors, rows, tensor.shape[0])
                yield n.of_part(part), scaled_rows(path, stored.pop(tensor.name), of_rows)

    return made


def _by_row(
    factors: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], num_rows: int
) -> npt.NDArray[np.float32]:
    """Returns float32 [rows, 1], or [1, 1] of one factor. The check of the model finds a wrong number of rows."""
    if len(factors) == 1:
        return factors[:, None]
    # config.json may state any number of rows.
    ends = np.minimum(np.cumsum(rows.astype(float)), num_rows).astype(np.int64)
    return factors.repeat(np.diff(ends, prepend=0, append=num_rows))[:, None]

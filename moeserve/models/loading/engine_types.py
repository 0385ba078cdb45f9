"""Checks whether an engine has kernels for a model's types, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.source import ModelSource
from moeserve.quantization import QUANT_TYPES, QuantType


def check_cpu_types(source: ModelSource, names: Iterable[str]) -> None:
    """Raises ModelError for the first of these tensors whose type is not supported. names: tensors that the CPU
    computes with."""
    for name in names:
        if not source.tensors[name].type.cpu:
            types = [row for row in QUANT_TYPES.values() if row.cpu]
            raise _unsupported(source, name, "which the CPU engine does not support; its types are", types)


def check_gpu_types(source: ModelSource, names: Iterable[str]) -> None:
    """Raises ModelError for the first of these tensors that the GPU engine cannot read. names: tensors of a model that
    runs at least partly on a GPU."""
    for name in names:
        kind = source.tensors[name].type
        if not kind.gpu and not kind.cpu:
            types = [row for row in QUANT_TYPES.values() if row.gpu]
            raise _unsupported(source, name, "which no engine supports; supported are", types)
        if not kind.gpu:
            raise ModelError(
                source.path,
                f"tensor {name!r} is of type {kind.name}, which only the CPU engine reads; run the model with "
                "--device cpu",
            )


def _unsupported(source: ModelSource, name: str, problem: str, types: list[QuantType]) -> ModelError:
    kind, supported = source.tensors[name].type.name, ", ".join(row.name for row in types)
    return SettingError(source.path, f"tensor {name!r} is of type {kind}, {problem} {supported}")

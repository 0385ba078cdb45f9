"""Checks config.json's `quantization_config`; unsupported schemes are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.models.errors import ModelError

from .json_files import read_json

INSTEAD = "download a GGUF file, or a folder of AWQ, GPTQ, compressed-tensors' pack-quantized, NVFP4 or FP8"
GPTQ, AWQ, COMPRESSED = "gptq", "awq", "compressed-tensors"
# 8-bit float matrices with separate scales.
FP8, FBGEMM, MODELOPT = "fp8", "fbgemm_fp8", "modelopt"
METHODS = frozenset({GPTQ, AWQ, COMPRESSED, FP8, FBGEMM, MODELOPT})
FLOATS = frozenset({COMPRESSED, FP8, FBGEMM, MODELOPT})
_COMPRESSED_FORMATS = frozenset(
    [
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "dense",
        "mixed-precision",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
    ]
)
_OLD_FILE = "quantize_config.json"  # AutoGPTQ's file
_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_ALGORITHMS = frozenset(
    ["FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION"]
)


def quantization_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the settings, with a normalised `quant_method`; None if the checkpoint is not quantised. Raises
    ModelError for an unsupported method or format."""
    path = folder / "config.json"
    settings = config.get("quantization_config")
    if settings is None:
        settings = config.get("compression_config")
    if settings is None and (folder / _OLD_FILE).exists():
        path = folder / _OLD_FILE
        settings = {"quant_method": GPTQ} | read_json(path)
    if settings is None and (folder / _MODELOPT_FILE).exists():
        path = folder / _MODELOPT_FILE
        theirs = read_json(path).get("quantization")
        settings = {**theirs, "quant_method": MODELOPT} if isinstance(theirs, dict) else theirs
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelError(path, f"quantization_config is {settings!r:.80}; an object is expected")
    method = settings.get("quant_method")
    if method in ("auto-round", "intel/auto-round"):
        method = _auto_round(path, settings)
    checks = {GPTQ: _check_gptq, AWQ: _check_awq, COMPRESSED: _check_compressed, MODELOPT: _check_modelopt}
    if isinstance(method, str) and method in checks:
        checks[method](path, settings)
    return {**settings, "quant_method": method}


def _refuse(path: Path, what: str) -> ModelError:
    return ModelError(path, f"has a quantization_config of {what}, which is not supported; {INSTEAD}")


def _auto_round(path: Path, settings: Mapping[str, Any]) -> str:
    form = str(settings.get("packing_format"))
    if "awq" in form:
        return AWQ
    if "gptq" in form:
        return GPTQ
    raise _refuse(path, f"auto-round's packing_format {form!r:.60}")


def _check_gptq(path: Path, settings: Mapping[str, Any]) -> None:
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise _refuse(path, f"GPTQ's checkpoint_format {form!r:.60}")


def is_gptq_v2(settings: Mapping[str, Any]) -> bool:
    """Returns whether zero points are stored unchanged; GPTQ's first format stores them minus 1."""
    return (settings.get("checkpoint_format") or settings.get("format")) == "gptq_v2"


def _check_awq(path: Path, settings: Mapping[str, Any]) -> None:
    version = settings.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise _refuse(path, f"AWQ's version {version!r:.60}")


def _check_compressed(path: Path, settings: Mapping[str, Any]) -> None:
    groups = settings.get("config_groups")
    for group in (settings, *(groups.values() if isinstance(groups, dict) else ())):
        form = group.get("format") if isinstance(group, dict) else None
        if form is not None and (not isinstance(form, str) or form not in _COMPRESSED_FORMATS):
            raise _refuse(path, f"compressed-tensors' format {form!r:.60}")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _refuse(path, f"compressed-tensors' sparse format {sparsity.get('format')!r:.60}")
    transforms = settings.get("transform_config")
    if transforms and transforms != {"config_groups": {}}:
        raise _refuse(path, f"compressed-tensors' transforms {json.dumps(transforms, default=str)[:60]}")


def _check_modelopt(path: Path, settings: Mapping[str, Any]) -> None:
    algorithm = settings.get("quant_algo")
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm not in _MODELOPT_ALGORITHMS):
        raise _refuse(path, f"ModelOpt's quant_algo {algorithm!r:.60}")

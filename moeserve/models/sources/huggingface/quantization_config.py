"""Checks config.json's `quantization_config`; unsupported schemes are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.json_files import read_json

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
# auto-round's packing_format
_AUTO_ROUND_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_AUTO_ROUND_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2", "auto")
_AUTO_ROUND_GPTQ_V2 = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2")
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
    mlx = config.get("quantization")  # also as quantization_config, without a method
    if isinstance(mlx, dict) and {"bits", "group_size"} <= mlx.keys() and settings in (None, mlx):
        raise _refuse(path, "MLX, in config.json's 'quantization'")
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
        raise SettingError(path, f"quantization_config is {settings!r:.80}; an object is expected")
    method = settings.get("quant_method")
    if method in ("auto-round", "intel/auto-round"):
        settings = _auto_round(path, settings)
        method = settings["quant_method"]
    checks = {GPTQ: _check_gptq, AWQ: _check_awq, COMPRESSED: _check_compressed, MODELOPT: _check_modelopt}
    if isinstance(method, str) and method in checks:
        checks[method](path, settings)
    return {**settings, "quant_method": method}


def _refuse(path: Path, what: str) -> ModelError:
    return ModelError(path, f"has a quantization_config of {what}, which is not supported; {INSTEAD}")


def _auto_round(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns auto-round's settings translated to GPTQ's or AWQ's. It packs as AWQ, or as GPTQ in either form: zero
    points less 1 only where the format's name says `gptq`. Versions before 0.4.3 name the format as `backend`."""
    backend = str(settings.get("backend"))  # of later versions: what transformers computes with
    form = settings.get("packing_format") or (backend if backend.startswith("auto_round") else "auto")
    data_type = settings.get("data_type") or "int"
    if not isinstance(data_type, str) or not data_type.startswith("int"):
        raise _refuse(path, f"auto-round's data_type {data_type!r:.60}")
    if settings.get("rotation_config"):
        raise _refuse(path, "auto-round's rotation_config")
    if form in _AUTO_ROUND_AWQ:
        return {**settings, "quant_method": AWQ}
    if form in _AUTO_ROUND_GPTQ:
        return {**settings, "quant_method": GPTQ, "checkpoint_format": "gptq"}
    if form in _AUTO_ROUND_GPTQ_V2:
        return {**settings, "quant_method": GPTQ, "checkpoint_format": "gptq_v2"}
    raise _refuse(path, f"auto-round's packing_format {form!r:.60}")


def _check_gptq(path: Path, settings: Mapping[str, Any]) -> None:
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise _refuse(path, f"GPTQ's checkpoint_format {form!r:.60}")
    pack_dtype = settings.get("pack_dtype") or "int32"
    if pack_dtype != "int32":
        raise _refuse(path, f"GPTQ's pack_dtype {pack_dtype!r:.60}")
    if settings.get("adapter"):  # EoRA: low-rank matrices beside the codes
        raise _refuse(path, "GPTQ's adapter (EoRA)")


def is_gptq_v2(settings: Mapping[str, Any]) -> bool:
    """Returns whether zero points are stored unchanged; GPTQ's first format stores them minus 1."""
    return (settings.get("checkpoint_format") or settings.get("format")) == "gptq_v2"


def _check_awq(path: Path, settings: Mapping[str, Any]) -> None:
    # AutoAWQ names the layout as `version`, GPTQModel as `checkpoint_format` or `format`.
    for key in ("version", "checkpoint_format", "format"):
        layout = settings.get(key) or "gemm"
        if "packing_format" not in settings and str(layout).lower() != "gemm":
            raise _refuse(path, f"AWQ's {key} {layout!r:.60}")
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4:
        raise _refuse(path, f"AWQ of {bits!r:.60} bits")


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

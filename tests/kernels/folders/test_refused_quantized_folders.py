"""Folders of 4 and 8 bits that are refused, with the scheme or the part that is the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from tests.support.models.quantized_folders import (
    BY_NAME,
    Scheme,
    edit_quantization,
    replace_part,
    write_pair,
)


@pytest.mark.parametrize(
    ("scheme", "changes", "said"),
    [
        ("awq", {"version": "gemv"}, "AWQ's version 'gemv'"),
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ's checkpoint_format 'marlin'"),
        ("w4a16", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse format 'sparse-24-bitmask'"),
        ("w4a16", {"transform_config": {"config_groups": {"R1": {}}}}, "compressed-tensors' transforms"),
        ("fp8-matrix", {"quant_algo": "W4A8_AWQ"}, "ModelOpt's quant_algo 'W4A8_AWQ'"),
        ("auto-round", {"packing_format": "auto_round:exllamav3"}, "packing_format 'auto_round:exllamav3'"),
        ("auto-round", {"packing_format": "auto_round:fp8_static"}, "packing_format 'auto_round:fp8_static'"),
        ("auto-round", {"packing_format": ["auto_round"]}, "auto-round's packing_format"),
        ("auto-round", {"data_type": "mx_fp4"}, "auto-round's data_type 'mx_fp4'"),
        ("auto-round", {"rotation_config": {"block_size": 32}}, "auto-round's rotation_config"),
        ("gptq", {"pack_dtype": "int16"}, "GPTQ's pack_dtype 'int16'"),
        ("gptq", {"adapter": {"name": "eora"}}, r"GPTQ's adapter \(EoRA\)"),
        ("awq", {"checkpoint_format": "gemv_fast"}, "AWQ's checkpoint_format 'gemv_fast'"),
        ("awq", {"bits": 8}, "AWQ of 8 bits"),
        ("w4a16", {"format": ["pack-quantized"]}, "compressed-tensors' format"),
        ("gptq", {"quant_method": "bitsandbytes"}, "quantization_config of 'bitsandbytes'"),
    ],
)
def test_schemes_that_are_not_read_are_refused_by_name(
    scheme: str, changes: dict[str, Any], said: str, of_floats: Path, tmp_path: Path
) -> None:
    quantized, _ = write_pair(of_floats, tmp_path, BY_NAME[scheme])
    edit_quantization(quantized, **changes)
    with pytest.raises(ModelError, match=said):
        open_folder(quantized)


_SHAPE = torch.tensor
WRONG_PARTS: list[tuple[str, str, torch.Tensor, str]] = [
    ("gptq", "q_proj.g_idx", torch.zeros(256, dtype=torch.int32), "groups of different sizes; 128 columns in each"),
    ("gptq", "q_proj.g_idx", torch.full((256,), -1, dtype=torch.int32), "do not fit one another"),
    ("gptq-order", "q_proj.g_idx", torch.arange(256, dtype=torch.int32), "do not fit one another"),
    ("gptq", "g_idx", torch.zeros(5, dtype=torch.int32), "do not fit one another"),
    ("gptq", "qzeros", torch.zeros(2, 24, dtype=torch.int32), "do not fit|codes of"),
    ("gptq", "scales", torch.zeros(0, 256, dtype=torch.float16), "F16 .*is expected"),
    ("gptq", "scales", torch.zeros(3, 256, dtype=torch.float16), "do not fit one another"),
    ("gptq", "qweight", torch.zeros(32, 256), "is F32 .* I32 is expected"),
    ("awq", "qweight", torch.zeros(256, 1, dtype=torch.int32), "do not fit one another"),
    ("w4a16", "weight_shape", _SHAPE([-1, 1 << 40]), "do not fit one another"),
    ("w4a16", "weight_shape", _SHAPE([256, 0]), "do not fit one another"),
    ("w4a16", "weight_shape", _SHAPE([1]), "do not fit one another"),
    ("w4a16", "weight_scale", torch.full((128, 2), 1 / 3), "scales of F32 that 16 bits do not hold|do not fit"),
    ("w4a16-asym", "weight_zero_point", torch.zeros(1, 8, dtype=torch.int32), "do not fit one another"),
    ("w8a8", "weight_scale", torch.zeros(3, 1), "do not fit one another"),
    ("fp8-block", "weight_scale_inv", torch.zeros(3, 3), r"F32 \[\d+, \d+\] is expected from the matrix it is for"),
    ("fp8-row", "weight_scale", torch.zeros(3), "one, one for each row, or one for each block is expected"),
    ("nvfp4", "weight_global_scale", torch.zeros(1), "is 0.0; a positive number is expected"),
    ("nvfp4", "weight_global_scale", torch.full((1,), 1e-45), "a positive number is expected"),
    ("nvfp4", "weight_global_scale", torch.ones(2), "one number is expected"),
    ("nvfp4", "weight_scale", torch.zeros(3, 16).to(torch.float8_e4m3fn), "do not fit one another"),
    ("nvfp4", "weight_packed", torch.zeros(128, 0, dtype=torch.uint8), "U8 .*is expected"),
    ("nvfp4-modelopt", "weight_scale_2", torch.tensor(torch.nan), "a positive number is expected"),
    ("mxfp4", "weight_scale", torch.zeros(3, 8, dtype=torch.uint8), "do not fit one another"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "part", "tensor", "said"), WRONG_PARTS)
def test_parts_that_do_not_fit_are_refused(
    scheme: str, part: str, tensor: torch.Tensor, said: str, of_floats: Path, tmp_path: Path
) -> None:
    quantized, _ = write_pair(of_floats, tmp_path, BY_NAME[scheme])
    replace_part(quantized, part, tensor)
    with pytest.raises(ModelError, match=said):
        open_folder(quantized)


@pytest.mark.parametrize(
    ("scheme", "part"),
    [("nvfp4", ".weight_global_scale"), ("nvfp4", ".weight_scale"), ("mxfp4", ".weight_scale"),
     ("fp8-block", ".weight_scale_inv"), ("nvfp4-modelopt", ".weight_scale_2"), ("gptq", ".scales")],
)  # fmt: skip
def test_a_part_that_is_missing_is_named(scheme: str, part: str, of_floats: Path, tmp_path: Path) -> None:
    quantized, _ = write_pair(of_floats, tmp_path, BY_NAME[scheme])
    for file in quantized.glob("*.safetensors"):
        save_file({name: t for name, t in load_file(file).items() if not name.endswith(part)}, file)
    with pytest.raises(ModelError, match=f"{part}' is missing; download the whole repository"):
        open_folder(quantized)


def test_scales_that_nvfp4_cannot_have_are_refused_when_they_are_read(
    of_floats: Path, tmp_path: Path
) -> None:
    quantized, _ = write_pair(of_floats, tmp_path, BY_NAME["nvfp4"])
    rows, cols = open_folder(quantized).tensors["blk.0.attn_q.weight"].shape
    shape = (rows, cols // 16)
    for value in (-1.0, torch.nan):
        replace_part(quantized, "q_proj.weight_scale", torch.full(shape, value).to(torch.float8_e4m3fn))
        source = open_folder(quantized)
        with pytest.raises(ModelError, match="scales that are negative or no numbers"):
            source.data("blk.0.attn_q.weight")


def test_groups_that_no_block_holds_are_refused(of_floats: Path, tmp_path: Path) -> None:
    scheme = Scheme("awq-16", BY_NAME["awq"].write, BY_NAME["awq"].config, group=16)
    with pytest.raises(ModelError, match=r"\d+ columns in groups of 16; multiples of 32 are"):
        open_folder(write_pair(of_floats, tmp_path, scheme)[0])

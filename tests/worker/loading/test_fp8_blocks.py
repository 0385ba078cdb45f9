"""Checkpoints of 8-bit floats with a scale a block, beside torch's own reading of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.huggingface.fp8_blocks import SCALE_SUFFIXES
from moeserve.quantization.reference import dequantize
from moeserve.quantization.table import BF16, F32, FP8_TYPES
from tests.support.models.hugging_face_model import write_family

BLOCK = 64  # not a divisor of the experts' 96 rows
LAYERS, EXPERTS = 3, 8
QUANTISED = ("_proj.weight", "_with_mqa.weight", "in_proj_qkvz.weight", "w1.weight", "w2.weight", "w3.weight")


def quantise(folder: Path) -> dict[str, torch.Tensor]:
    """All matrices but router, embedding and head, as published checkpoints have them. Gives what they stand for."""
    expected = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(QUANTISED)]:
            weight = tensors[name].float()
            blocks = [-(-size // BLOCK) for size in weight.shape]
            scales = 0.5 + torch.rand(*blocks)
            spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            spread = spread[: weight.shape[0], : weight.shape[1]]
            tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
            tensors[name + SCALE_SUFFIXES[0]] = scales
            expected[name] = tensors[name].float() * spread
        save_file(tensors, file)
    (folder / "model.safetensors.index.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    write_family(tmp_path / "tiny", "minimax_m2")
    return tmp_path / "tiny"


def test_matrices_are_read_as_torch_reads_them(folder: Path) -> None:
    expected = quantise(folder)
    source = open_folder(folder)
    read_checked_shape(source)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        wanted = {
            n.ATTN_Q: expected[prefix + "self_attn.q_proj.weight"],
            n.FFN_DOWN_EXPS: torch.stack(
                [expected[f"{prefix}block_sparse_moe.experts.{e}.w2.weight"] for e in range(EXPERTS)]
            ),
        }
        # Experts of 96 columns in blocks of 64: blocks of 32 divide both.
        for (part, values), kind in zip(wanted.items(), (FP8_TYPES[64], FP8_TYPES[32]), strict=True):
            tensor = source.tensors[n.of_layer(layer, part)]
            assert (tensor.type, tensor.shape) == (kind, tuple(values.shape))
            data = source.data(tensor.name)
            assert data.nbytes == tensor.nbytes
            assert torch.equal(torch.from_numpy(dequantize(kind, data)).view(values.shape), values)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_tensors_made_of_such_matrices_are_those_of_a_folder_of_floats(tmp_path: Path, family: str) -> None:
    """Keys' and values' up-projections come from one matrix, turned, and become bfloat16; a recurrence's inputs from
    one that interleaves them, in rows."""
    write_family(tmp_path / "fp8", family)
    write_family(tmp_path / "floats", family)
    expected = quantise(tmp_path / "fp8")
    for file in (tmp_path / "floats").glob("*.safetensors"):
        save_file({name: expected.get(name, tensor) for name, tensor in load_file(file).items()}, file)
    found, wanted = open_folder(tmp_path / "fp8"), open_folder(tmp_path / "floats")
    assert read_checked_shape(found) == read_checked_shape(wanted)
    assert found.tensors.keys() == wanted.tensors.keys()
    assert any(name.endswith(("attn_k_b.weight", "attn_qkv.weight")) for name in found.tensors)
    for name in wanted.tensors:
        theirs = dequantize(wanted.tensors[name].type, wanted.data(name))
        if found.tensors[name].type == BF16 and wanted.tensors[name].type == F32:
            theirs = torch.from_numpy(theirs).bfloat16().float().numpy()
        assert np.array_equal(dequantize(found.tensors[name].type, found.data(name)), theirs), name


def test_every_byte_means_what_torch_takes_it_for(folder: Path) -> None:
    """But for the two that are no numbers, which quantisers do not write."""
    quantise(folder)
    name = "model.layers.0.self_attn.k_proj.weight"
    (file,) = (f for f in folder.glob("*.safetensors") if name in load_file(f))
    tensors = load_file(file)
    bytes_ = torch.arange(tensors[name].numel()).to(torch.uint8).view(tensors[name].shape)
    tensors[name] = bytes_.view(torch.float8_e4m3fn)
    save_file(tensors, file)
    source = open_folder(folder)
    tensor = source.tensors[n.of_layer(0, n.ATTN_K)]
    read = torch.from_numpy(dequantize(tensor.type, source.data(tensor.name))).view(tensor.shape)
    scales = tensors[name + SCALE_SUFFIXES[0]].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    values = tensors[name].float()
    values = torch.where(values.isnan(), torch.where(bytes_ < 128, 480.0, -480.0), values)
    assert torch.equal(read, values * scales)


def test_scales_that_are_missing_or_do_not_fit_are_named(folder: Path) -> None:
    quantise(folder)
    file = next(
        f for f in folder.glob("*.safetensors") if any(k.endswith(SCALE_SUFFIXES[0]) for k in load_file(f))
    )
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith(SCALE_SUFFIXES[0]))
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ModelError, match=rf"tensor '{name}' is missing"):
        open_folder(folder)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, file)
    with pytest.raises(ModelError, match="is expected from the matrix it is for"):
        open_folder(folder)


def test_blocks_that_nothing_describes_are_refused(folder: Path) -> None:
    quantise(folder)
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"quantization_config": config["quantization_config"] | {"weight_block_size": None}}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError, match="one for each row, or one for each block is expected"):
        open_folder(folder)

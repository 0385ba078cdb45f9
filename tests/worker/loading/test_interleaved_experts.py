"""gpt-oss's experts in Hugging Face's layout: MXFP4 blocks, beside transformers' own reading of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import names as n
from moeserve.quantization.reference import dequantize
from moeserve.quantization.table import MXFP4
from tests.support.models.hugging_face_model import write_family

LAYERS, EXPERTS, HIDDEN, WIDTH = 3, 8, 128, 96
PARTS = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}

Packed = dict[str, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_family(tmp_path / "tiny", "gpt_oss")
    return tmp_path / "tiny"


@pytest.fixture
def packed(folder: Path) -> Packed:
    """Random blocks in the place of the floats, as OpenAI publishes them: by the name of the floats."""
    made: Packed = {}
    generator = torch.Generator().manual_seed(5)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.rpartition(".")[2] in PARTS]:
            out, cols = PARTS[name.rpartition(".")[2]]
            blocks = torch.randint(0, 256, (EXPERTS, out, cols // 32, 16), generator=generator)
            scales = torch.randint(110, 125, (EXPERTS, out, cols // 32), generator=generator)
            made[name] = blocks.to(torch.uint8), scales.to(torch.uint8)
            del tensors[name]
            tensors |= {f"{name}_blocks": made[name][0], f"{name}_scales": made[name][1]}
        save_file(tensors, file)
    (folder / "model.safetensors.index.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    return made


def test_blocks_are_what_transformers_reads(folder: Path, packed: Packed) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = open_folder(folder)
    read_checked_shape(source)
    assert len(packed) == LAYERS * len(PARTS)
    for layer in range(LAYERS):
        # [E, in, out], gate and up in turn: as its experts multiply them.
        gate_up, down = (
            convert_moe_packed_tensors(*packed[f"model.layers.{layer}.mlp.experts.{part}"]).float()
            for part in PARTS
        )
        wanted = {
            n.FFN_GATE_EXPS: gate_up[..., ::2],
            n.FFN_UP_EXPS: gate_up[..., 1::2],
            n.FFN_DOWN_EXPS: down,
        }
        for part, values in wanted.items():
            tensor = source.tensors[n.of_layer(layer, part)]
            assert tensor.type is MXFP4
            data = source.data(tensor.name)
            assert data.nbytes == tensor.nbytes
            read = torch.from_numpy(dequantize(MXFP4, data)).view(tensor.shape)
            assert torch.equal(read, values.transpose(1, 2))


def test_what_is_missing_or_of_another_form_is_named(folder: Path, packed: Packed) -> None:
    (file,) = (
        f for f in folder.glob("*.safetensors") if any("layers.1.mlp.experts" in k for k in load_file(f))
    )
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_scales"))
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ModelError, match=rf"tensor '{name}' is missing"):
        open_folder(folder)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, file)
    with pytest.raises(ModelError, match="do not fit one another"):
        open_folder(folder)

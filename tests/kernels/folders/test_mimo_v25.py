"""MiMo-V2.5: q, k and v in one tensor, in GGUF files and in folders, where 8-bit floats were quantised in parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder, open_model
from moeserve.quantization.reference import dequantize
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.folders.folder_variants import edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.folder_as_gguf import write_gguf
from tests.support.models.hugging_face_model import write_family

Tensors = dict[str, torch.Tensor]
Values = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
BLOCK = (48, 32)  # rows and columns that share a scale
HEADS, KEY, VALUE = 4, 96, 64
# What MiMo-V2.5's config.json says beside or instead of MiMo-V2-Flash's.
PUBLISHED = {
    "model_type": "mimo_v2",
    "attention_projection_layout": "fused_qkv",
    "layer_types": None,
    "hybrid_layer_pattern": [0, 1, 1],
    "mlp_layer_types": None,
    "moe_layer_freq": [0, 1, 1],
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    "swa_num_key_value_heads": 4,
    "sliding_window_size": 16,
    "routed_scaling_factor": None,
}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of MiMo-V2-Flash with q, k and v apart."""
    folder = tmp_path_factory.mktemp("mimo") / "split"
    write_family(folder, "mimo_v2_flash", torch.float32, num_key_value_heads=2)
    return folder


def logits(path: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[0], threads=1), path).logits(TOKENS)


def tensors_of(folder: Path) -> Tensors:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def write_folder(folder: Path, like: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir()
    for file in like.iterdir():
        if not file.name.startswith("model"):
            (folder / file.name).write_bytes(file.read_bytes())
    seen = {"visual.patch_embed.proj.weight": torch.ones(2, 3), "audio_encoder.x": torch.ones(2)}
    save_file(tensors | seen, folder / "model.safetensors")
    edit_config(folder, **(PUBLISHED | config))
    return folder


def fused(tensors: Tensors, parts: int = 1) -> tuple[Tensors, Tensors]:
    """Returns the tensors without q, k and v, and the fused matrices: in each part rows of q, then k, then v."""
    rest, whole = dict(tensors), {}
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        each = [rest.pop(name.replace("q_proj", f"{one}_proj")).chunk(parts) for one in "qkv"]
        whole[name.replace("q_proj", "qkv_proj")] = torch.cat(
            [one[part] for part in range(parts) for one in each]
        ).contiguous()
    return rest, whole


def scaled(matrix: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a matrix's 8-bit floats, their scales, and the product, in parts whose blocks begin anew."""
    codes, scales, values = [], [], []
    for part in matrix.chunk(parts):
        rows, cols = part.shape
        padded = torch.nn.functional.pad(part, (0, 0, 0, -rows % BLOCK[0]))
        blocks = padded.unflatten(0, (-1, BLOCK[0])).unflatten(2, (-1, BLOCK[1]))
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :cols]
        codes.append((part / spread).to(torch.float8_e4m3fn))
        scales.append(scale)
        values.append(codes[-1].float() * spread)
    return (
        torch.cat([one.view(torch.uint8) for one in codes]).view(torch.float8_e4m3fn),
        torch.cat(scales),
        torch.cat(values),
    )


def published(folder: Path, split: Path, parts: int, **config: object) -> tuple[Path, dict[str, Values]]:
    """Writes a folder with fused matrices of 8-bit floats; returns it, and the values of q, k and v in GGUF's names."""
    rest, whole = fused(tensors_of(split), parts)
    values = {}
    for name, matrix in whole.items():
        rest[name], rest[f"{name}_scale_inv"], exact = scaled(matrix, parts)
        kv_heads = (len(matrix) - HEADS * KEY) // (KEY + VALUE)
        sizes = [HEADS * KEY // parts, kv_heads * KEY // parts, kv_heads * VALUE // parts]
        cut = [one.split(sizes) for one in exact.chunk(parts)]
        layer = name.split(".")[2]
        for at, part in enumerate("qkv"):
            values[f"blk.{layer}.attn_{part}.weight"] = torch.cat([one[at] for one in cut]).numpy()
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": BLOCK,
    }
    return write_folder(folder, split, rest, quantization_config=quantization, **config), values


def test_a_folder_with_one_matrix_has_the_logits_of_one_with_three(split: Path, tmp_path: Path) -> None:
    rest, whole = fused(tensors_of(split))
    folder = write_folder(tmp_path / "fused", split, rest | whole)
    assert not any(name.startswith(("visual", "audio")) for name in open_folder(folder).skipped)
    assert torch.equal(logits(folder), logits(split))


def test_matrices_of_8_bits_in_parts_have_the_scales_of_their_part(split: Path, tmp_path: Path) -> None:
    folder, values = published(tmp_path / "published", split, parts=2)
    source = open_folder(folder)
    for name, expected in values.items():
        info = source.tensors[name]
        assert info.type.name == "FP8_G32"
        found = dequantize(info.type, source.data(name)).reshape(info.shape)
        np.testing.assert_array_equal(found, expected)
    exact = tensors_of(split)
    for name, value in values.items():
        _, layer, part, _ = name.split(".")
        exact[f"model.layers.{layer}.self_attn.{part[-1]}_proj.weight"] = torch.from_numpy(value)
    expected_logits = logits(
        write_folder(tmp_path / "exact", split, exact, attention_projection_layout="split")
    )
    errors = ((logits(folder) - expected_logits) ** 2).mean(-1) / (expected_logits**2).mean()
    assert errors.median() < 1e-6


@pytest.mark.parametrize(
    ("parts", "changes", "said"),
    [
        (
            1,
            {"attention_projection_layout": "x"},
            "'attention_projection_layout' is 'x'; split and fused_qkv are",
        ),
        (2, {"num_attention_heads": 2}, "self_attn.qkv_proj' has .* rows in 2 parts, which do not fit"),
    ],
)
def test_refused(split: Path, tmp_path: Path, parts: int, changes: dict[str, object], said: str) -> None:
    folder, _ = published(tmp_path / "published", split, parts, **changes)
    with pytest.raises(ModelError, match=said):
        open_folder(folder)


def test_scales_that_fit_several_numbers_of_parts_are_refused(split: Path, tmp_path: Path) -> None:
    rest, whole = fused(tensors_of(split))
    for name, matrix in whole.items():
        rest[name] = matrix.to(torch.float8_e4m3fn)
        rest[f"{name}_scale_inv"] = torch.ones(len(matrix) // 32, matrix.shape[1] // 32)
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = write_folder(tmp_path / "published", split, rest, quantization_config=settings)
    with pytest.raises(ModelError, match=r"its scales fit \[1, 2\] of parts; use a GGUF file"):
        open_folder(folder)


def test_a_gguf_with_one_matrix_has_the_logits_of_one_with_three(split: Path, tmp_path: Path) -> None:
    """KV heads differ by layer, and values are narrower than keys."""
    write_gguf(split, tmp_path / "split.gguf")
    reader = GGUFReader(tmp_path / "split.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    writer = GGUFWriter(tmp_path / "fused.gguf", "mimo2")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for name, tensor in tensors.items():
        if name.endswith("attn_q.weight"):
            three = [tensors[name.replace("attn_q", f"attn_{part}")] for part in "qkv"]
            rows = np.concatenate([one.data for one in three])
            writer.add_tensor(name.replace("attn_q", "attn_qkv"), rows, raw_dtype=tensor.tensor_type)
        elif not name.endswith(("attn_k.weight", "attn_v.weight")):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_model(tmp_path / "fused.gguf").tensors["blk.1.attn_v.weight"].shape[0] == 4 * VALUE
    assert torch.equal(logits(tmp_path / "fused.gguf"), logits(tmp_path / "split.gguf"))


def test_the_published_settings_are_read(split: Path, tmp_path: Path) -> None:
    rest, whole = fused(tensors_of(split))
    folder = write_folder(tmp_path / "fused", split, rest | whole)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mimo_v2"
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(ModelError, match="'rope_parameters' is"):
        open_folder(folder)

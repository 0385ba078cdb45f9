"""Folders of Falcon-H1: multipliers, Mamba-2's norm, config.json as it is published, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS, transformers_logits
from tests.kernels.folders.folder_variants import edit_config
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.models.hugging_face_model import write_family

PUBLISHED: dict[str, Any] = {  # multipliers of the 0.5B model
    "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "key_multiplier": 0.390625,
    "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226039551584, "mlp_multipliers": [0.8838834764831845, 0.5859375],
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}  # fmt: skip
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("falcon_h1")
    write_family(path, "falcon_h1")
    return path


@pytest.mark.parametrize("changes", [PUBLISHED, NORMED], ids=["multipliers", "norm"])
def test_it_is_what_transformers_computes(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whose rounding of the products is below that of the cache."""
    model = write_family(tmp_path, "falcon_h1", torch.float32, **changes)
    truth = transformers_logits(model.from_pretrained(tmp_path, dtype=torch.float32), monkeypatch)
    assert nmse(Engine(stream_of(ISAS[0], threads=1), tmp_path).logits(TOKENS), truth) < 1e-7


def test_a_product_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "falcon_h1", torch.float16, **PUBLISHED)
    name = "model.layers.1.mamba.in_proj.weight"
    file = next(file for file in tmp_path.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    tensors[name][0, 0] = 65504.0  # its row's factor is 1.25 * 0.35
    save_file(tensors, file)
    assert np.isfinite(open_folder(tmp_path).data("blk.1.ssm_in.weight").view(np.float16)).all()
    edit_config(tmp_path, ssm_in_multiplier=4.0)
    with pytest.raises(ModelError, match=f"tensor '{name}' times its multiplier exceeds float16's range"):
        open_folder(tmp_path).data("blk.1.ssm_in.weight")


def test_products_are_rounded_to_the_stored_type(tmp_path: Path) -> None:
    model = write_family(tmp_path, "falcon_h1", torch.bfloat16, **PUBLISHED)
    source = open_folder(tmp_path)
    layer = model.from_pretrained(tmp_path, dtype=torch.float32).model.layers[1]
    z, x, b, c, dt = PUBLISHED["ssm_multipliers"]
    pieces = layer.mamba.in_proj.weight.split([192, 192, 64, 64, 6])
    gate, down = PUBLISHED["mlp_multipliers"]
    expected = {
        "attn_q": layer.self_attn.q_proj.weight * 0.9,
        "attn_k": layer.self_attn.k_proj.weight * (0.9 * 0.390625),
        "attn_v": layer.self_attn.v_proj.weight * 0.9,
        "attn_output": layer.self_attn.o_proj.weight * 0.9375,
        "ssm_in": torch.cat([p * (1.25 * m) for p, m in zip(pieces, (z, x, b, c, dt), strict=True)]),
        "ssm_out": layer.mamba.out_proj.weight * PUBLISHED["ssm_out_multiplier"],
        "ffn_gate": layer.feed_forward.gate_proj.weight * gate,
        "ffn_up": layer.feed_forward.up_proj.weight,
        "ffn_down": layer.feed_forward.down_proj.weight * down,
    }
    for part, weight in expected.items():
        name = f"blk.1.{part}.weight"
        assert source.tensors[name].type.name == "BF16", part
        found = torch.from_numpy(np.array(source.data(name)).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(found.view(weight.shape), weight.to(torch.bfloat16)), part


def test_settings_as_they_are_published(folder: Path) -> None:
    expected = read_checked_shape(open_folder(folder))
    assert expected.recurrence is not None
    assert all(layer.attention is not None and layer.beside is not None for layer in expected.layers)
    before = (folder / "config.json").read_text()
    edit_config(
        folder,
        attn_layer_indices=None,
        mamba_d_head="auto",
        mamba_expand=2,
        mamba_use_mlp=True,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=1e6,
        time_step_limit=None,
    )
    found = read_checked_shape(open_folder(folder))
    (folder / "config.json").write_text(before)
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_layer_indices": [0]}, "'attn_layer_indices' is"),
        ({"mamba_rms_norm": True}, "'mamba_norm_before_gate' is true"),
        ({"mamba_d_head": 64}, "'mamba_d_head' is 64"),
        ({"ssm_multipliers": [1.0] * 4}, "'ssm_multipliers' is .* 5 numbers"),
        ({"mlp_multipliers": [1.0, "x"]}, "'mlp_multipliers' is 'x'"),
        ({"key_multiplier": 0.0}, "'key_multiplier' is 0.0"),
        ({"mamba_proj_bias": True}, "'mamba_proj_bias' is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of 'fp8'"),
        (NORMED, "'mamba_rms_norm' is True, and Mamba-2 has no norms in the files"),
        ({"mamba_d_state": 1 << 20, "mamba_n_groups": 1024, "ssm_multipliers": [2.0] * 5}, "ssm"),
    ],
    ids=str,
)
def test_other_variants_are_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    before = (folder / "config.json").read_text()
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=said):
        read_checked_shape(open_folder(folder))
    (folder / "config.json").write_text(before)

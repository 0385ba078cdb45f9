"""Hugging Face folders whose config.json differs from the published models': beside transformers' own model of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.registry import read_checked_shape
from tests.kernels.families.transformers_logits import (
    assert_is_what_transformers_computes,
)
from tests.kernels.folders.folder_variants import assert_is_near_transformers, edit_config
from tests.support.models.hugging_face_model import write_family
from tests.support.models.hugging_face_settings import ROPE

if TYPE_CHECKING:
    pass

FULL, LINEAR = "full_attention", "linear_attention"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2", "glm4_moe_lite"])
def test_norms_of_latents_have_their_own_epsilon(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e-6, whatever rms_norm_eps says; a large one shows it."""
    model = write_family(tmp_path / "tiny", model_type, torch.float32, rms_norm_eps=1e-2)
    assert_is_what_transformers_computes(tmp_path / "tiny", model, monkeypatch)


@pytest.mark.parametrize(
    ("model_type", "count"),
    [
        ("deepseek_v3", 0),
        ("deepseek_v3", None),
        ("deepseek_v2", None),
        ("glm4_moe_lite", 0),
        ("glm4_moe", None),
    ],
)
def test_no_shared_experts(
    model_type: str, count: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers itself has a shared expert of no width; DeepSeek's own code has none where config.json has null."""
    folder = tmp_path / "tiny"
    model = write_family(folder, model_type, n_shared_experts=0)
    truth = model.from_pretrained(folder, dtype=torch.float32)
    if count is None:
        edit_config(folder, n_shared_experts=None)
        _drop(folder, "shared_experts")
    monkeypatch.setattr(model, "from_pretrained", lambda *_, **__: truth)
    assert_is_what_transformers_computes(folder, model, monkeypatch)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_shared_experts_that_config_json_speaks_of_are_needed(model_type: str, tmp_path: Path) -> None:
    write_family(tmp_path / "tiny", model_type)
    _drop(tmp_path / "tiny", "shared_experts")
    with pytest.raises(ModelError, match=r"tensor 'blk\.\d\.ffn_gate_shexp\.weight' is missing"):
        read_checked_shape(open_folder(tmp_path / "tiny"))


def _drop(folder: Path, part: str) -> None:
    """Without the tensors whose names have this part."""
    index = folder / "model.safetensors.index.json"
    for file in folder.glob("*.safetensors"):
        save_file({name: t for name, t in load_file(file).items() if part not in name}, file)
    content = json.loads(index.read_text())
    content["weight_map"] = {name: f for name, f in content["weight_map"].items() if part not in name}
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_next", {"full_attention_interval": 2}),
        ("qwen3_next", {"full_attention_interval": 3, "num_hidden_layers": 5}),
        ("qwen3_next", {"layer_types": [LINEAR, FULL, LINEAR, LINEAR]}),
        ("qwen3_next", {"layer_types": [FULL] * 4}),
        ("qwen3_5_moe_text", {"layer_types": [FULL, LINEAR, LINEAR, FULL]}),
    ],
    ids=str,
)
def test_attention_in_other_layers_than_every_fourth(
    model_type: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "tiny", model_type, **changes)
    assert_is_near_transformers(tmp_path / "tiny", model, monkeypatch)


def test_how_much_of_a_head_rotates_is_said_once(tmp_path: Path) -> None:
    """By `rotary_dim`, by `partial_rotary_factor`, or by both where they agree."""
    folder = tmp_path / "tiny"
    write_family(folder, "minimax_m2")  # half of 64 dimensions
    edit_config(folder, rotary_dim=32)
    attention = read_checked_shape(open_folder(folder)).layers[0].attention
    assert isinstance(attention, AttentionShape)
    assert attention.rotated == 32
    edit_config(folder, rotary_dim=16)
    with pytest.raises(ModelError, match=r"'rotary_dim' is 16 and 'partial_rotary_factor' 0\.5 of 64"):
        open_folder(folder)


def test_layer_types_are_before_the_interval(tmp_path: Path) -> None:
    """As in transformers; without them the interval holds."""
    write_family(tmp_path / "tiny", "qwen3_next", layer_types=[FULL, LINEAR, LINEAR, FULL])

    def attending() -> list[int]:
        layers = read_checked_shape(open_folder(tmp_path / "tiny")).layers
        return [i for i, layer in enumerate(layers) if not isinstance(layer.mixer, GatedDeltaNetShape)]

    edit_config(tmp_path / "tiny", full_attention_interval=4)
    assert attending() == [0, 3]
    edit_config(tmp_path / "tiny", full_attention_interval=3, layer_types=None)
    with pytest.raises(ModelError):  # tensors of other layers
        attending()


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([FULL, LINEAR], "one of linear_attention and full_attention a layer"),
        (5, "'layer_types' is 5"),
        ([FULL, LINEAR, "sliding_attention", FULL], "'layer_types' has 'sliding_attention'"),
        ([FULL, LINEAR, [], FULL], r"'layer_types' has \[\]"),
        ([LINEAR] * 4, "no attention layer"),
    ],
    ids=str,
)
def test_layer_types_that_say_nothing_known(types: object, message: str, tmp_path: Path) -> None:
    write_family(tmp_path / "tiny", "qwen3_next")
    edit_config(tmp_path / "tiny", layer_types=types)
    with pytest.raises(ModelError, match=message):
        read_checked_shape(open_folder(tmp_path / "tiny"))


@pytest.mark.parametrize("is_copy", [True, False], ids=["a copy", "its own"])
def test_a_head_of_a_tied_model(is_copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does not tie where both are there and differ."""
    folder = tmp_path / "tiny"
    model = write_family(folder, "qwen3", tie_word_embeddings=False)
    if is_copy:
        _copy_head(folder)
    edit_config(folder, tie_word_embeddings=True)
    assert read_checked_shape(open_folder(folder)).tied_embeddings == is_copy
    assert_is_what_transformers_computes(folder, model, monkeypatch)


def test_a_tied_model_with_the_head_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    model = write_family(folder, "qwen3", tie_word_embeddings=True)
    _copy_head(folder)
    _drop(folder, "embed_tokens")
    assert_is_what_transformers_computes(folder, model, monkeypatch)


def _copy_head(folder: Path) -> None:
    """A head beside the embedding, in its file."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for file in files:
        file.unlink()
    index.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        (ROPE, YARN),
        (YARN, YARN | {"factor": 8.0}),
        (YARN, {key: value for key, value in YARN.items() if key != "factor"}),
        (YARN, YARN | {"beta_fast": 16.0}),
        (
            YARN | {"rope_theta": 1e4},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=str,
)
def test_two_ropes_that_do_not_agree_are_refused(
    parameters: dict[str, Any], scaling: dict[str, Any], tmp_path: Path
) -> None:
    write_family(tmp_path / "tiny", "qwen3")
    edit_config(tmp_path / "tiny", rope_parameters=parameters, rope_scaling=scaling, rope_theta=1e6)
    with pytest.raises(ModelError, match=r"'rope_scaling' is .* and 'rope_parameters' .* do not agree"):
        open_folder(tmp_path / "tiny")


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        YARN | {"rope_theta": None, "beta_fast": None},
        {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128},
    ],
    ids=str,
)
def test_two_ropes_that_agree_are_one(
    scaling: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "tiny", "qwen3", rope_parameters=dict(YARN))
    truth = model.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    edit_config(tmp_path / "tiny", rope_scaling=scaling, rope_theta=1e6)
    monkeypatch.setattr(model, "from_pretrained", lambda *_, **__: truth)
    assert_is_what_transformers_computes(tmp_path / "tiny", model, monkeypatch)

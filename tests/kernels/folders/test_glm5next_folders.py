"""Folders of GLM-5.3-Flash as transformers writes them, which is as they are published: beside transformers, in
bfloat16 too, with a next-token block, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from tests.kernels.engines.model_engine import Engine, distance
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.glm5next_model import DENSE_UP_TO, LAYERS, logits, new_model
from tests.support.models.hugging_face_model import tokenizer_files

TOKENS = [(37 * i * i + 11 * i) % 600 for i in range(90)]


def write_folder(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="1MB")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model(10)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return write_folder(model, tmp_path / "tiny")


def logits_of(folder: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[-1]), folder).logits(TOKENS)


def assert_near(truth: torch.Tensor, found: torch.Tensor) -> None:
    kl, agrees = distance(truth, found)
    assert kl[:DENSE_UP_TO].max() < 1e-6
    assert kl.median() < 1e-5
    assert agrees.double().mean() > 0.9


def edit(folder: Path, **changes: object) -> None:
    """Changes the text's settings; ... removes."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for name, value in changes.items():
        whole["text_config"].pop(name, None)
        if value is not ...:
            whole["text_config"][name] = value
    path.write_text(json.dumps(whole))


def rewrite(folder: Path, rename: Callable[[str], str], more: dict[str, torch.Tensor]) -> None:
    tensors = {
        rename(name): t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()
    }
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file(tensors | more, folder / "model.safetensors")


def test_a_folder_is_what_transformers_computes(model: Any, folder: Path) -> None:
    truth, found = logits(model, TOKENS), logits_of(folder)
    assert_near(truth, found)
    other = Engine(stream_of(ISAS[-1], 3), folder)
    assert torch.equal(other.logits(TOKENS, 7), found)


@pytest.mark.slow
def test_in_bfloat16(tmp_path: Path) -> None:
    model = new_model(11)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "conv1d" not in name:
            weight.data = weight.data.bfloat16().float()
    truth = logits(model, TOKENS)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "conv1d" not in name:
            weight.data = weight.data.bfloat16()
    assert_near(truth, logits_of(write_folder(model, tmp_path / "tiny")))


def test_as_it_is_published(folder: Path) -> None:
    """With a next-token block, the settings of linear attention in an object, and the kinds of layers by rule."""
    expected = logits_of(folder)
    linear = {
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 3,
        "gate_lower_bound": -5.0,
        "safe_gate": True,
    }
    edit(
        folder, linear_attn_config=linear, mlp_layer_types=..., first_k_dense_replace=1, mla_use_nope=True,
        scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1,
        **{f"linear_{name}": ... for name in ("lower_bound", "head_dim", "num_heads", "conv_kernel_dim")},
        layer_types=["linear_attention", "linear_attention", "full_attention", "full_attention"],
        indexer_types=["full"] * (LAYERS + 1),
    )  # fmt: skip
    under = f"model.language_model.layers.{LAYERS}."
    rewrite(
        folder,
        str,
        {under + name: torch.ones(4, 4) for name in ("eh_proj.weight", "shared_head.norm.weight")},
    )
    assert torch.equal(logits_of(folder), expected)


def test_the_text_alone(folder: Path) -> None:
    expected = logits_of(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())["text_config"]))
    rewrite(folder, lambda name: name.replace("model.language_model.", "model."), {})
    assert torch.equal(logits_of(folder), expected)


def test_without_a_kind_of_layers_every_fourth_attends(folder: Path) -> None:
    edit(folder, layer_types=...)
    with pytest.raises(ModelError, match=r"blk\.2\.attn_q"):  # this model's third one attends
        read_checked_shape(open_folder(folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["linear_attention"] * LAYERS}, "has no attention layer"),
        ({"layer_types": ["linear_attention"]}, "'layer_types' is"),
        ({"linear_attn_config": [1]}, "'linear_attn_config' is [1]; an object is expected"),
        ({"linear_num_heads": 4}, "'num_heads' of linear attention is 4"),
        ({"linear_lower_bound": 1.0}, "'linear_lower_bound' is 1.0"),
        ({"indexer_types": ["full", "full", "full", "shared"]}, "'indexer_types' is"),
        ({"index_kpool": 5}, "whole blocks of 5 keys"),
        ({"index_kpool_always_select_tail": False}, "kpool_select_tail"),
        ({"qk_rope_head_dim": 32}, "'qk_rope_head_dim' is 32"),
        ({"swiglu_limit": -1.0}, "'swiglu_limit' is -1.0"),
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "'mlp_layer_types' is"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_would_be_computed_wrongly(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit(folder, **changes)
    with pytest.raises(ModelError, match=re.escape(said)):
        read_checked_shape(open_folder(folder))

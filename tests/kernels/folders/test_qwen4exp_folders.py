"""Folders of Qwen3.8-Flash-Next as transformers writes them, which is as they are published: beside transformers, in
bfloat16 and 8-bit floats, with a next-token block and a vision tower, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.qwen4exp.ngram_settings import head_offsets, head_rows, multipliers
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import names as n
from tests.kernels.engines.model_engine import Engine, distance
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.hugging_face_model import tokenizer_files
from tests.support.models.qwen4exp_model import BUDGET, logits, new_model, text

Tensors = dict[str, torch.Tensor]
TOKENS = text(8)
TABLE = "model.language_model.layers.1.ple.ple_embedding."
PARTS = 4


def test_hashes_are_the_published_ones() -> None:
    """Numbers that Qwen3.8-Flash-Next's checkpoint states beside its table."""
    rows = head_rows(20_000_000, 16)
    assert rows[:4] == [20000003, 20000023, 20000033, 20000047]
    assert rows[-1] == 20000171
    assert sum(rows) == 320001446
    assert head_offsets(rows)[:3] == [0, 20000003, 40000026]
    assert multipliers(1234, 3, 248320) == [23703573157769, 20109073645365, 8052911324071]


def write_folder(model: Any, folder: Path) -> Path:
    """Writes the text model as transformers does, then with the names of the multimodal model that is published."""
    model.save_pretrained(folder, max_shard_size="1MB")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model(8, split_ngram_parts=PARTS)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return write_folder(model, tmp_path / "tiny")


def stored(folder: Path) -> Tensors:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def logits_of(folder: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[-1]), folder).logits(TOKENS)


def assert_near(truth: torch.Tensor, found: torch.Tensor) -> None:
    kl, agrees = distance(truth, found)
    assert kl[:BUDGET].max() < 1e-6
    assert kl.median() < 1e-5
    assert agrees.double().mean() > 0.9


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(stored(folder))
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def published(folder: Path) -> None:
    """Makes the text model a part of a multimodal one, with a next-token block and the kinds of layers' older name."""
    text_config = json.loads((folder / "config.json").read_text())
    text_config["layer_types"] = [each.replace("indexed", "full") for each in text_config["layer_types"]]
    vision = {"model_type": "qwen4_exp", "depth": 1}
    whole = {
        "model_type": "qwen4_exp",
        "text_config": text_config,
        "vision_config": vision,
        "mtp": {"hybrid": True},
    }
    (folder / "config.json").write_text(json.dumps(whole))
    more = {"model.visual.pos_embed.weight": torch.ones(4, 4), "mtp.fc_hidden.weight": torch.ones(4, 4)}
    rewrite(
        folder,
        lambda tensors: (
            {
                (
                    name
                    if name == "lm_head.weight"
                    else f"model.language_model.{name.removeprefix('model.')}"
                ): tensor
                for name, tensor in tensors.items()
            }
            | more
        ),
    )


def test_a_folder_is_what_transformers_computes(model: Any, folder: Path) -> None:
    assert sum(".ngram_embedding.shard_" in name for name in stored(folder)) == PARTS
    found = logits_of(folder)
    assert_near(logits(model, TOKENS), found)
    other = Engine(stream_of(ISAS[-1], 3), folder)
    assert torch.equal(other.logits(TOKENS, 7), found)


def test_as_it_is_published(folder: Path) -> None:
    expected = logits_of(folder)
    published(folder)
    assert TABLE + "layer_multipliers" in stored(folder)
    assert torch.equal(logits_of(folder), expected)


def test_rows_of_the_table_are_read_alone(folder: Path) -> None:
    source = open_folder(folder)
    count = source.tensors[n.LAYER_INPUT_EMBD].shape[0]
    whole = source.data(n.LAYER_INPUT_EMBD).reshape(count, -1)
    rows = np.array([0, count // PARTS - 1, count // PARTS, count - 1, 5])
    assert np.array_equal(source.rows(n.LAYER_INPUT_EMBD, rows), whole[rows])


def in_eight_bits(folder: Path) -> Tensors:
    """Stores the table as in the published checkpoint in 8-bit floats, with one scale. Returns what its parts stand
    for."""
    meant: Tensors = {}

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if ".shard_" in name:
                found[name] = (tensor / 0.02).to(torch.float8_e4m3fn)
                meant[name] = found[name].float() * 0.015625
            else:
                found[name] = tensor
        return found | {
            TABLE + "ngram_embedding.weight_scale": torch.tensor([0.015625], dtype=torch.bfloat16)
        }

    rewrite(folder, change)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
        "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_a_table_of_8_bit_floats(model: Any, folder: Path, tmp_path: Path) -> None:
    """With the published form's one scale. Its rows are 32 columns wide."""
    published(folder)
    meant = in_eight_bits(folder)
    found = logits_of(folder)
    weights = model.state_dict()
    table = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    rows = torch.cat([meant[f"{TABLE}ngram_embedding.shard_{part}.weight"] for part in range(PARTS)])
    other = new_model(8, split_ngram_parts=PARTS)
    other.load_state_dict(weights | {table: rows})
    assert_near(logits(other, TOKENS), found)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"output_gate_type": "silu"}, "'output_gate_type' is 'silu'; only 'sigmoid' is supported"),
        ({"indexer_kv_heads": 2}, "'indexer_kv_heads' is 2; only 1 is supported"),
        ({"ple_layer_ids": [2, 3]}, r"'ple_layer_ids' is \[2, 3\]; the number of one layer"),
        ({"ple_layer_ids": []}, "the number of one layer, from 1 on, is expected"),
        ({"ngram_size": 17}, "up to 16 and 256 are supported"),
        ({"ple_embed_dim": 129}, "'ple_embed_dim' is 129; a multiple of 4"),
        ({"ngram_vocab_size_base": 1 << 40}, "'ngram_vocab_size_base' is 1099511627776; 2 to"),
        ({"seed": 7}, "layer_multipliers' has other numbers than follow from config.json"),
        ({"layer_types": ["linear_attention"] * 3}, "of each layer is expected"),
        ({"eos_token_id": []}, "'eos_token_id' is"),
    ],
)
def test_settings_are_checked(folder: Path, changes: dict[str, object], cause: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(open_folder(folder))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t: {k: v for k, v in t.items() if ".shard_1." not in k}, r"shard_1\.weight' is missing"),
        (lambda t: {k: v[:, :8] if ".shard_1." in k else v for k, v in t.items()}, "has 8 columns"),
        (lambda t: {k: v.half() if ".shard_1." in k else v for k, v in t.items()}, "is F16"),
        (
            lambda t: {k: v.to(torch.float8_e4m3fn) if ".shard_" in k else v for k, v in t.items()},
            r"ngram_embedding\.weight_scale' is missing",
        ),
        (lambda t: {k: v.int() if ".shard_" in k else v for k, v in t.items()}, "is of type I32"),
        (
            lambda t: {k: v + 2 if k.endswith("heads_offsets") else v for k, v in t.items()},
            "other hashes of n-grams are not supported",
        ),
    ],
)
def test_tables_are_checked(folder: Path, change: Callable[[Tensors], Tensors], cause: str) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(open_folder(folder))

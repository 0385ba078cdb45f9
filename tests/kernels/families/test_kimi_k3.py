"""Kimi-K3 on the CPU engine beside what test_families.py shows: folders as they are published, other forms of its
residual, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.kernels.stream_operands import Activations
from moeserve.models.blocks.cpu.residual import add_block
from moeserve.models.blocks.cpu.workspace import AttendedWorkspace
from moeserve.models.errors import ModelError
from moeserve.models.kimilinear.k3 import MOST_STREAMS
from moeserve.models.open import open_folder, open_model
from moeserve.models.registry import read_checked_shape, read_shape
from moeserve.models.residual import AttentionResiduals
from moeserve.models.sources.gguf import names as n
from tests.conftest import OWN_FIXTURES
from tests.kernels.engines.model_engine import Engine, distance
from tests.kernels.operations import ISAS, stream_of
from tests.support.models.changed_header import with_number
from tests.support.models.kimi_k3_folder import VOCAB, write_folder

FILE = OWN_FIXTURES / "tiny-kimik3-f16.gguf"
TOKENS = [(37 * i * i + 11 * i) % 600 for i in range(40)]


def logits_of(path: Path) -> torch.Tensor:
    return Engine(stream_of(ISAS[-1]), path).logits(TOKENS)


def test_a_folder_as_it_is_published(tmp_path: Path) -> None:
    """The same weights but for the last bit of the decays' rates, whose logarithm the folder has. llama.cpp's distance
    from the truth is ten times the bound."""
    found = logits_of(write_folder(FILE, tmp_path / "folder"))
    expected = logits_of(FILE)
    kl, agrees = distance(expected, found[:, : expected.shape[1]])
    assert kl.max() < 1e-6
    assert agrees.all()


def test_the_folder_has_the_files_shape(tmp_path: Path) -> None:
    folder = open_folder(write_folder(FILE, tmp_path / "folder"))
    assert read_checked_shape(folder) == replace(read_shape(open_model(FILE)), vocab_size=VOCAB)


def test_a_folder_without_residuals_of_earlier_layers(tmp_path: Path) -> None:
    """Its tensors then have no place; a folder without a bound of the second hyperbolic tangent is read."""
    shape = read_shape(open_folder(write_folder(FILE, tmp_path / "a", activation_situ_linear_beta=None)))
    assert shape.layers[0].unrouted is not None
    assert shape.layers[0].unrouted.limit is None
    with pytest.raises(ModelError, match="has no place in architecture 'kimi-k3'"):
        read_checked_shape(open_folder(write_folder(FILE, tmp_path / "b", attn_res_block_size=None)))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"hidden_act": "silu"}, "'hidden_act' is 'silu'; only 'situ' is supported"),
        ({"mla_use_output_gate": False}, "'mla_use_output_gate' is False"),
        ({"mla_use_nope": False}, "'mla_use_nope' is False"),
        (
            {"linear_attn_config": {"use_full_rank_gate": False}},
            "'use_full_rank_gate' of 'linear_attn_config'",
        ),
        ({"linear_attn_config": ...}, "'use_full_rank_gate' of 'linear_attn_config'"),
        ({"activation_situ_beta": 0.0}, "'activation_situ_beta' is 0.0"),
        ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func' is"),
        (
            {"latent_moe_use_norm": False},
            "'latent_moe_use_norm' is false, but there is a tensor 'blk.1.ffn_routed_norm.weight'",
        ),
        ({"latent_moe_use_norm": "no"}, "'latent_moe_use_norm' is 'no'"),
    ],
)
def test_settings_that_would_be_computed_wrongly(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        read_shape(open_folder(write_folder(FILE, tmp_path / "folder", **changes)))


@pytest.mark.parametrize("stated", [True, False, None, ...])
def test_a_norm_of_the_experts_sum_that_is_not_there(tmp_path: Path, stated: Any) -> None:
    """Folders whose config does not state it have it or not."""
    folder = write_folder(FILE, tmp_path / "folder", latent_moe_use_norm=stated)
    weights = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "routed_expert_norm" not in k}, weights)
    if stated is True:
        with pytest.raises(ModelError, match="'latent_moe_use_norm' is true, but there is no tensor"):
            read_shape(open_folder(folder))
    else:
        shape = read_checked_shape(open_folder(folder))
        assert {layer.moe.latent_norm for layer in shape.layers if layer.moe is not None} == {""}


@pytest.mark.parametrize("lists", [{}, {"full_attn_layers": None}, {"full_attn_layers": 3}])
def test_layers_that_attend_are_not_listed(tmp_path: Path, lists: dict[str, Any]) -> None:
    written = write_folder(FILE, tmp_path / "folder") / "config.json"
    config = json.loads(written.read_text())
    text = config["text_config"]
    every = list(range(1, text["num_hidden_layers"] + 1))
    del text["linear_attn_config"]["full_attn_layers"]
    text["linear_attn_config"] |= {"kda_layers": every} | lists
    written.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'full_attn_layers' and 'kda_layers' are .* is expected once"):
        open_folder(written.parent)


def test_the_cpus_kernel_attends_to_as_many_streams() -> None:
    """And to no more: `MOST_STREAMS` is `kMostAttended`."""
    stream = stream_of(ISAS[-1], threads=1)
    weight, y = torch.ones(32), Activations(1, 32)

    def attend(streams: int) -> None:
        stream.attend_streams(torch.ones(1, streams * 32), None, weight, weight, 1e-6, streams, 1, y)
        stream.wait()

    attend(MOST_STREAMS)
    assert torch.allclose(y.f32, torch.ones(1, 32))
    with pytest.raises(ValueError, match="num"):
        attend(MOST_STREAMS + 1)


def test_a_block_adds_its_output_only_after_it_has_read() -> None:
    """Before, its stream is not known: the embedding's would take it."""
    shape = read_shape(open_model(FILE))
    assert isinstance(shape.streams, AttentionResiduals)
    space: Any = SimpleNamespace(streams=AttendedWorkspace(shape.streams, shape.hidden_size, 1))
    with pytest.raises(AssertionError):
        add_block(stream_of(ISAS[-1], threads=1), 1, space)


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("attn_res.block_size", 1 << 31, "is 2147483648; 0 to 1024 is supported"),
        ("attn_res.block_size", 0, "tensor 'output_res_score.weight' has no place"),
        ("expert_latent_length", 1 << 31, "is 2147483648; 0 to 65536 is supported"),
        ("expert_latent_length", 32, r"tensor 'blk.1.ffn_routed_down.weight' has shape \[64, 128\]"),
        ("kda.head_dim", 32, r"tensor 'blk.0.attn_q.weight' has shape \[192, 128\]"),
    ],
)
def test_numbers_that_do_not_fit(tmp_path: Path, key: str, value: int, cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        read_checked_shape(open_model(with_number(FILE, tmp_path / "model.gguf", key, value)))


def test_the_residual_begins_anew_every_few_layers() -> None:
    """As llama.cpp and the published code keep residuals: before the mixer of layers 0, 2 and 4."""
    residuals = AttentionResiduals(5, 2)
    assert residuals.count == 4
    read = [(residuals.reading(n.HC_ATTN, layer), residuals.reading(n.HC_FFN, layer)) for layer in range(5)]
    assert [tuple(mixer) for mixer, _ in read] == [
        (1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False), (3, 3, True),
    ]  # fmt: skip
    assert [tuple(ffn) for _, ffn in read] == [
        (2, 1, False), (2, 1, False), (3, 2, False), (3, 2, False), (4, 3, False),
    ]  # fmt: skip
    assert residuals.reading(n.OUTPUT_HC, None).num == 4

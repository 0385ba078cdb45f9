"""ModelShape: read, range-checked, and held against the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType

from moeserve.models.attention import AttentionShape
from moeserve.models.errors import ModelError
from moeserve.models.registry import read_checked_shape, read_shape
from moeserve.models.rope_scaling import RopeScaling
from moeserve.models.sources.gguf import GGUFFile, open_gguf
from moeserve.models.tensors import check_tensors
from tests.support.models.gemma_file import write_gemma
from tests.support.models.gguf_bytes import TOKENS, Tensor, gguf_bytes, model_metadata, model_tensors


def _model(tmp_path: Path, tensors: list[Tensor] | None = None, **changes: Any) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(model_metadata(**changes), model_tensors() if tensors is None else tensors))
    return open_gguf(path)


def test_packaged_model(tiny_model: Path) -> None:
    file = open_gguf(tiny_model)
    config = read_shape(file)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (256, 3, 4096)
    assert config.layers[0].attention == AttentionShape(4, 2, 128, qk_norm="head")
    assert (config.num_experts, config.top_k, config.expert_width) == (8, 2, 256)
    assert (config.rope_theta, config.context_length) == (1e6, 2048)
    assert config.rms_eps == pytest.approx(1e-6)
    assert config.rope_scaling == RopeScaling()
    assert not config.tied_embeddings
    check_tensors(config, file)


def test_missing_output_matrix_means_tied_embeddings(tmp_path: Path) -> None:
    file = _model(tmp_path)
    config = read_shape(file)
    assert config.tied_embeddings
    check_tensors(config, file)
    untied = _model(tmp_path, [*model_tensors(), Tensor("output.weight", (32, len(TOKENS)))])
    config = read_shape(untied)
    assert not config.tied_embeddings
    check_tensors(config, untied)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"general__architecture": "falcon"},
            "architecture 'falcon' is not supported; supported are qwen3moe, qwen2moe",
        ),
        ({"block_count": None}, "'qwen3moe.block_count' is missing"),
        ({"block_count": 0}, "'qwen3moe.block_count' is 0; 1 to 1024"),
        ({"embedding_length": 1 << 31}, "'qwen3moe.embedding_length' is 2147483648; 1 to 65536"),
        ({"expert_used_count": 4}, "'qwen3moe.expert_used_count' is 4; 1 to 3"),
        ({"attention__head_count_kv": [2, 2]}, "'qwen3moe.attention.head_count_kv' is an array"),
        ({"attention__head_count": 3, "attention__head_count_kv": 2}, "is 2; it must divide the 3 heads"),
        ({"attention__key_length": 7}, "'qwen3moe.attention.key_length' is 7; RoPE needs an even number"),
        ({"attention__value_length": 16}, "'qwen3moe.attention.value_length' is 16; 8 to 8"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon' is 0.0"),
        ({"expert_shared_count": 1}, "'qwen3moe.expert_shared_count' is 1; 0 to 0"),
        (
            {"rope__scaling__type": "longrope"},
            "is 'longrope', which is not supported; supported are none, linear",
        ),
        ({"rope__scaling__factor": 0.5}, "'qwen3moe.rope.scaling.factor' is 0.5"),
        ({"rope__scaling__factor": float("nan")}, "'qwen3moe.rope.scaling.factor' is nan"),
        # What other architectures have, with a value that would change this one's computation.
        (
            {"logit_scale": 0.0625},
            "'qwen3moe.logit_scale' is 0.0625; this architecture is supported only without it",
        ),
        ({"attention__scale": 0.1}, "'qwen3moe.attention.scale' is 0.1"),
        ({"expert_group_count": 8}, "'qwen3moe.expert_group_count' is 8"),
        ({"expert_weights_scale": 2.5}, "'qwen3moe.expert_weights_scale' is 2.5"),
        ({"final_logit_softcapping": 30.0}, "'qwen3moe.final_logit_softcapping' is 30.0"),
        ({"swiglu_clamp_exp": [0, 7]}, "'qwen3moe.swiglu_clamp_exp' is "),
        ({"attention__causal": False}, "'qwen3moe.attention.causal' is False"),
    ],
)
def test_metadata_out_of_range_is_refused(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_shape(_model(tmp_path, **changes))
    assert cause in str(caught.value)


def test_rope_scaling(tmp_path: Path) -> None:
    def scaling(**changes: Any) -> RopeScaling:
        return read_shape(_model(tmp_path, **changes)).rope_scaling

    yarn = scaling(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=512
    )
    assert yarn == RopeScaling("yarn", 4.0, 512)
    assert scaling(rope__scaling__type="linear", rope__scaling__factor=2.0) == RopeScaling("linear", 2.0)
    assert scaling(rope__scaling__factor=2.0) == RopeScaling("linear", 2.0)
    assert scaling(rope__scale_linear=4.0) == RopeScaling("linear", 4.0), "the older name"
    assert scaling(rope__scale_linear=1.0, rope__scaling__factor=2.0) == RopeScaling("linear", 2.0)
    with pytest.raises(
        ModelError, match=r"rope.scale_linear' is 4.0, and rope.scaling.factor 2.0: they do not"
    ):
        scaling(rope__scale_linear=4.0, rope__scaling__factor=2.0)
    assert scaling(rope__scaling__type="none", rope__scaling__factor=2.0) == RopeScaling()
    assert scaling(rope__scaling__factor=0.0) == RopeScaling()


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    read_shape(
        _model(tmp_path, logit_scale=1.0, expert_group_count=1, attention__causal=True, residual_scale=0.0)
    )


def _replace(name: str, *replacements: Tensor) -> list[Tensor]:
    tensors = model_tensors()
    index = [tensor.name for tensor in tensors].index(name)
    return [*tensors[:index], *replacements, *tensors[index + 1 :]]


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        (_replace("blk.1.attn_k.weight"), "tensor 'blk.1.attn_k.weight' is missing"),
        (
            _replace("blk.0.ffn_gate_exps.weight", Tensor("blk.0.ffn_gate_exps.weight", (64, 32, 3))),
            "'blk.0.ffn_gate_exps.weight' has shape [3, 32, 64] (outermost dimension first), [3, 64, 32] is expected",
        ),
        (
            _replace("blk.0.ffn_down_exps.weight", Tensor("blk.0.ffn_down_exps.weight", (3, 32, 64))),
            "has shape [64, 32, 3] (outermost dimension first), [3, 32, 64] is expected",
        ),
        (
            [*model_tensors(), Tensor("blk.0.ffn_gate_inp.bias", (3,))],
            "'blk.0.ffn_gate_inp.bias' has no place in architecture",
        ),
        (
            _replace("output_norm.weight", Tensor("output_norm.weight", (32,), GGMLQuantizationType.Q8_0)),
            "'output_norm.weight' is of type Q8_0; norms and biases are expected as F32, F16 or BF16",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, tensors: list[Tensor], cause: str) -> None:
    file = _model(tmp_path, tensors)
    with pytest.raises(ModelError) as caught:
        read_checked_shape(file)
    assert cause in str(caught.value)


def test_every_wide_fixture_is_accepted(wide_fixtures: Path) -> None:
    paths = sorted(wide_fixtures.glob("tiny-qwen3moe-*.gguf"))
    assert paths
    for path in paths:
        read_checked_shape(open_gguf(path))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_gemma_that_is_stretched_is_refused(tmp_path: Path, kind: str) -> None:
    """llama.cpp stretches its layers without windows alone."""
    path = write_gemma(tmp_path / "gemma.gguf", GGMLQuantizationType.F32, rope_scaling=kind)
    with pytest.raises(ModelError, match=rf"gemma4\.rope\.scaling\.type' is '{kind}'"):
        read_shape(open_gguf(path))


def test_a_gemma_that_is_not_stretched_is_read(tmp_path: Path) -> None:
    path = write_gemma(tmp_path / "gemma.gguf", GGMLQuantizationType.F32, rope_scaling="none")
    assert read_shape(open_gguf(path)).rope_scaling == RopeScaling()

"""PEFT's files: what is read out of them, and which are refused, by the name of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeserve.errors import ConfigError
from moeserve.models.adapters.adapter import ProductKey
from moeserve.models.adapters.errors import AdapterError
from moeserve.models.adapters.modules import parse_modules, resolve_modules
from moeserve.models.adapters.peft_names import FUSED_EXPERTS, Place, place_of
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.sources.gguf import names as n
from tests.support.models.peft_files import GATE, GOOD, PREFIX, SHAPE, Arrays, Q, pair, write


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 3}}, 1.5),
        ({"alpha_pattern": {"k_proj": 3}}, 4.0),
        ({"r": 7, "rank_pattern": {"layers.0.self_attn.q_proj": 2}}, 4.0),
        ({"alpha_pattern": {r".*\.q_proj": 3}}, 1.5),
        ({"alpha_pattern": {".*_proj": 3}}, 1.5),
        ({"alpha_pattern": {"^q_proj": 3, ".*x_proj": 5}}, 4.0),
        ({"init_lora_weights": "gaussian", "megatron_config": {"a": 1}, "use_later": False}, 4.0),
    ],
)
def test_the_scale_is_multiplied_into_b(settings: dict[str, Any], scale: float, tmp_path: Path) -> None:
    adapter = PeftAdapter("a", write(tmp_path / "a", **settings), SHAPE).read()
    a, b = adapter.products[ProductKey(0, n.ATTN_Q)]
    assert np.array_equal(a, GOOD[f"{PREFIX}self_attn.q_proj.lora_A.weight"])
    assert np.allclose(b, GOOD[f"{PREFIX}self_attn.q_proj.lora_B.weight"] * scale, rtol=1e-6)


def test_float16_is_read(tmp_path: Path) -> None:
    tensors = pair("self_attn.q_proj", Q.cols, Q.rows, dtype=np.float16)
    adapter = PeftAdapter("a", write(tmp_path / "a", tensors), SHAPE).read()
    found = adapter.products[ProductKey(0, n.ATTN_Q)].a
    assert np.array_equal(found, tensors[f"{PREFIX}self_attn.q_proj.lora_A.weight"].astype(np.float32))


def test_the_key_is_of_the_content(tmp_path: Path) -> None:
    one, same = (PeftAdapter(name, write(tmp_path / name), SHAPE).read() for name in ("one", "same"))
    other = PeftAdapter("one", write(tmp_path / "other", lora_alpha=9), SHAPE).read()
    assert one.key == same.key != other.key


def test_the_older_form_of_fused_experts_has_in_and_out_swapped(tmp_path: Path) -> None:
    """W + dW of expert e, as PEFT before 0.18 had it: dW[e, i, o] = sum_r B[o, r, e] A[e, r, i]."""
    experts, ff, hidden, rank = GATE.experts, GATE.rows, GATE.cols, 2
    tensors = pair("mlp.experts", 2 * ff, hidden, rank * experts)
    adapter = PeftAdapter("a", write(tmp_path / "a", tensors, lora_alpha=2), SHAPE).read()
    a = tensors[f"{PREFIX}mlp.experts.lora_A.weight"].reshape(experts, rank, 2 * ff)
    b = tensors[f"{PREFIX}mlp.experts.lora_B.weight"].reshape(hidden, rank, experts)
    delta = np.einsum("ore,eri->eio", b, a)
    for part, rows in ((n.FFN_GATE_EXPS, slice(0, ff)), (n.FFN_UP_EXPS, slice(ff, 2 * ff))):
        found = adapter.products[ProductKey(0, part, experts - 1)]
        assert np.allclose(found.b @ found.a, delta[experts - 1, rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "tensors",
    [
        GOOD,
        pair("mlp.experts.3.up_proj", GATE.cols, GATE.rows),
        pair("mlp.experts", GATE.cols, 2 * GATE.rows, 2 * GATE.experts),
        pair("mlp.experts", 2 * GATE.rows, GATE.cols, 2 * GATE.experts),
        pair("mlp.experts", GATE.rows, GATE.cols, 2 * GATE.experts),
        pair("mlp.experts", GATE.cols, GATE.rows, 2 * GATE.experts),
    ],
    ids=["one", "of an expert", "gate and up", "gate and up, swapped", "down", "down, swapped"],
)
def test_the_header_tells_the_size(tensors: Arrays, tmp_path: Path) -> None:
    checked = PeftAdapter("a", write(tmp_path / "a", tensors), SHAPE)
    assert checked.nbytes == checked.read().num_bytes


def _without_b() -> Arrays:
    return {name: value for name, value in GOOD.items() if "lora_A" in name}


def _with_nan() -> Arrays:
    bad = {name: value.copy() for name, value in GOOD.items()}
    bad[f"{PREFIX}self_attn.q_proj.lora_B.weight"][3, 1] = np.nan
    return bad


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (pair("self_attn.q_proj", Q.cols + 1, Q.rows), "q_proj.lora_A.weight"),
        (pair("self_attn.q_proj", Q.cols, Q.rows + 1), "q_proj.lora_B.weight"),
        (pair("self_attn.q_proj", Q.cols, Q.rows, rank=3), "q_proj.lora_A.weight"),
        (pair("self_attn.q_norm", Q.cols, Q.rows), "q_norm.lora_A.weight"),
        (pair("mlp.shared_expert.up_proj", Q.cols, Q.rows), "ffn_up_shexp"),
        (pair("mlp.experts.99.up_proj", GATE.cols, GATE.rows), "experts.99.up_proj"),
        (pair("mlp.experts", GATE.cols, GATE.rows + 1, 2 * GATE.experts), "mlp.experts.lora_A"),
        (pair("self_attn.q_proj", Q.cols, Q.rows, dtype=np.int8), "type I8"),
        ({name.replace("layers.0", "layers.77"): value for name, value in GOOD.items()}, "layer 77"),
        ({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}, "lm_head.weight"),
        (
            {f"{PREFIX}self_attn.q_proj.lora_magnitude_vector": np.zeros(2, np.float32)},
            "lora_magnitude_vector",
        ),
        (_without_b(), "q_proj.lora_A.weight"),
        (_with_nan(), "q_proj.lora_B.weight"),
        ({}, "no tensors"),
    ],
)
def test_a_bad_tensor_is_refused_by_its_name(tensors: Arrays, named: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=named.replace(".", r"\.")):
        PeftAdapter("a", write(tmp_path / "a", tensors), SHAPE).read()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": "x"}, "use_rslora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "'r'"),
        ({"r": 1 << 20}, "'r'"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "JSON|lora_alpha"),
        ({"rank_pattern": {"(a+)+": 2}}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"init_lora_weights": "PiSSA"}, "'init_lora_weights' is 'PiSSA'"),
        ({"init_lora_weights": "loftq"}, "'init_lora_weights' is 'loftq'"),
        ({"init_lora_weights": "corda"}, "'init_lora_weights' is 'corda'"),
        ({"init_lora_weights": "lora_ga"}, "'init_lora_weights' is 'lora_ga'"),
        ({"init_lora_weights": ["x"]}, "'init_lora_weights'"),
        ({"use_what_comes_next": True}, "'use_what_comes_next' is True"),
        ({"next_config": {"a": 1}}, "'next_config'"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"target_parameters": "x"}, "'target_parameters' is not a list"),
        ({"target_parameters": [5]}, "'target_parameters' is not a list"),
    ],
)
def test_a_setting_that_is_not_had_is_refused_by_its_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=named):
        PeftAdapter("a", write(tmp_path / "a", **settings), SHAPE)


@pytest.mark.parametrize("cut", [0, 4, 9, 200])
def test_a_file_that_is_cut_off_is_refused(cut: int, tmp_path: Path) -> None:
    file = write(tmp_path / "a") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        PeftAdapter("a", tmp_path / "a", SHAPE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json: is missing"):
        PeftAdapter("a", tmp_path, SHAPE)


def test_names_and_paths(tmp_path: Path) -> None:
    assert parse_modules(["a=/x", "b=/y=z"]) == {"a": "/x", "b": "/y=z"}
    for bad in ("a", "=x", "a=", "a\n=x"):
        with pytest.raises(ConfigError, match="name=path"):
            parse_modules([bad])
    with pytest.raises(ConfigError, match="twice"):
        parse_modules(["a=x", "a=y"])
    with pytest.raises(ConfigError, match="the model itself"):
        resolve_modules([f"tiny={tmp_path}"], ["tiny"])
    with pytest.raises(ConfigError, match="no file or folder"):
        resolve_modules([f"a={tmp_path}/none"], ["tiny"])
    assert resolve_modules([f"a={tmp_path}/."], ["tiny"]) == (f"a={tmp_path}",)


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.language_model.layers.3.self_attn.q_proj", Place(3, n.ATTN_Q)),
        ("model.language_model.layers.3.router.proj", Place(3, n.FFN_GATE_INP)),
        ("model.layers.3.experts.base_layer", Place(3, FUSED_EXPERTS)),
        ("model.vision_tower.encoder.layers.3.self_attn.q_proj", None),
        ("model.visual.layers.3.mlp.gate_proj", None),
    ],
)
def test_which_product_a_module_is(module: str, place: Place | None) -> None:
    """What reads pictures has layers of the same names."""
    assert place_of(module) == place

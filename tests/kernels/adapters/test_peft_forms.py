"""Adapters that say in several ways what they change, beside PEFT's own model of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.models.adapters.errors import AdapterError
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from tests.kernels.adapters.adapter_engine import PROMPTS, Engine, adapter_of
from tests.kernels.weights import nmse
from tests.support.models.hugging_face_model import read_model, write_family, write_model, write_qwen2_moe
from tests.support.models.peft_adapters import EXPERTS, ROUTER, logits_of, write_adapter

PLAIN = {"r": 4, "lora_alpha": 8}
GPT_OSS = ["mlp.router.weight", *EXPERTS]
GEMMA = ["router.proj.weight", "experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of floats, so that there is no rounding but that of k and v."""
    root = tmp_path_factory.mktemp("models")
    for family in ("gpt_oss", "qwen3", "glm4_moe", "gemma4_text"):
        write_family(root / family, family, torch.float32)
    # As wide as its experts, as gpt-oss-20b is: A and B alone do not say what is gate and up, and what is down.
    write_family(root / "square", "gpt_oss", torch.float32, intermediate_size=128)
    write_model(root / "qwen3_moe", torch.float32)
    write_qwen2_moe(root / "qwen2_moe", torch.float32)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS}),
        ("gpt_oss", {"target_modules": ["q_proj", "o_proj"], "target_parameters": GPT_OSS}),
        ("gpt_oss", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
        ("gpt_oss", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
        ("square", {"target_modules": [], "target_parameters": EXPERTS}),
        ("square", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
        ("gpt_oss", {"target_modules": "all-linear"}),
        ("qwen3", {"target_modules": "all-linear", "use_rslora": True}),
        ("qwen3_moe", {"target_modules": "all-linear"}),
        ("glm4_moe", {"target_modules": "all-linear"}),
        # Layers whose values are made from the keys' product have no v_proj.
        ("gemma4_text", {"target_modules": "all-linear"}),
        ("gemma4_text", {"target_modules": ["k_proj"], "target_parameters": GEMMA}),
        (
            "qwen3_moe",
            {
                "target_modules": ["q_proj", "k_proj"],
                "target_parameters": [ROUTER, *EXPERTS],
                "rank_pattern": {
                    "experts.gate_up_proj": 2,
                    "layers.1.mlp.experts.down_proj": 3,
                    "mlp.gate.weight": 5,
                    "^model.layers.2.self_attn.q_proj": 7,
                },
                "alpha_pattern": {"mlp.experts.down_proj": 30, "gate.weight": 1, r"self_attn\.k_proj": 20},
            },
        ),
        (
            "gpt_oss",
            {
                "target_modules": ["v_proj"],
                "target_parameters": GPT_OSS,
                "use_rslora": True,
                "rank_pattern": {"down_proj": 6, "router.weight": 3},
                "alpha_pattern": {"layers.0.mlp.experts.gate_up_proj": 3, "v_proj": 30},
            },
        ),
        (
            "qwen3",
            {
                "target_modules": ["q_proj", "k_proj"],
                "rank_pattern": {".*k_proj": 2, r"^.*\.self_attn\.q_proj$": 6},
                "alpha_pattern": {".*layers.1.self_attn.q_proj": 30},
            },
        ),
        # The name of the module is not the parameter's: nothing matches.
        (
            "qwen3_moe",
            {"target_modules": [], "target_parameters": EXPERTS, "rank_pattern": {"mlp.experts": 9}},
        ),
        ("qwen3", {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
        ("qwen3", {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}),
    ],
    ids=str,
)
def test_what_peft_computes(
    family: str, settings: dict[str, Any], written: dict[str, Path], tmp_path: Path
) -> None:
    folder = written[family]
    base = read_model(folder)
    model = write_adapter(tmp_path / "adapter", base, 3, **(PLAIN | settings))
    ours, plain = Engine(folder, [adapter_of(tmp_path / "adapter", folder)]).logits(PROMPTS[:2], [0, -1])
    truth = logits_of(model, PROMPTS[0])
    assert error(ours, truth) < 1e-4
    assert error(logits_of(base, PROMPTS[0]), truth) > 1e-3  # it changes something
    assert error(plain, logits_of(base, PROMPTS[1])) < 1e-4


def error(logits: torch.Tensor, truth: torch.Tensor) -> float:
    """At the median position: where k or v is rounded to the other side, a router may choose another expert."""
    return float((((logits - truth) ** 2).mean(-1) / (truth**2).mean()).median())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"init_lora_weights": "pissa"},
            "'init_lora_weights' is 'pissa', which changes the model's own weights",
        ),
        ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "'init_lora_weights' is 'olora'"),
        ({"use_dora": True}, "'use_dora' is True"),
        ({"bias": "all"}, "'bias' is 'all'"),
        ({"modules_to_save": ["embed_tokens"]}, "'modules_to_save'"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices'"),
        ({"target_modules": ["embed_tokens"]}, r"tensor 'base_model.model.model.embed_tokens"),
        ({"target_modules": ["lm_head"]}, r"tensor 'base_model.model.lm_head"),
    ],
    ids=str,
)
def test_what_peft_writes_of_other_kinds_is_refused_by_name(
    settings: dict[str, Any], named: str, written: dict[str, Path], tmp_path: Path
) -> None:
    folder = written["qwen3"]
    base = read_model(folder)
    write_adapter(tmp_path / "adapter", base, 3, **(PLAIN | {"target_modules": ["q_proj"]} | settings))
    with pytest.raises(AdapterError, match=named):
        adapter_of(tmp_path / "adapter", folder)


def test_a_pissa_that_peft_has_made_plain(written: dict[str, Path], tmp_path: Path) -> None:
    """The way that the refusal names."""
    folder, first, last = written["qwen3"], tmp_path / "first", tmp_path / "last"
    base = read_model(folder)
    settings = PLAIN | {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": "pissa"}
    model = write_adapter(first, base, 3, trained=False, **settings)
    config: Any = model.peft_config["default"]
    config.init_lora_weights = True
    model.save_pretrained(str(first))
    config.init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(str(last), path_initial_model_for_weight_conversion=str(first))
    assert json.loads((last / "adapter_config.json").read_text())["init_lora_weights"] is True
    ours = Engine(folder, [adapter_of(last, folder)]).logits(PROMPTS[:1], [0])[0]
    assert nmse(ours, logits_of(model, PROMPTS[0])) < 1e-4


def test_a_module_without_a_place_is_named(written: dict[str, Path], tmp_path: Path) -> None:
    """For Qwen2-MoE, "all-linear" includes the gate of the shared expert."""
    folder = written["qwen2_moe"]
    base = read_model(folder)
    write_adapter(tmp_path / "adapter", base, 3, **PLAIN, target_modules="all-linear")
    with pytest.raises(AdapterError, match=r"shared_expert_gate.lora_A.weight' is of a module for which"):
        PeftAdapter("a", tmp_path / "adapter", read_shape(open_model(folder)))

"""LoRA adapters on the CPU engine, beside PEFT's own model: several of them and none in one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.kernels.cpu_stream import LoraTable
from moeserve.kernels.lora.reference import add_adapters, to_panels
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.worker.engines.cpu.engine import adapter_rows
from tests.conftest import TINY_MODEL
from tests.kernels.adapters.adapter_engine import MOST, PROMPTS, Engine, adapter_of
from tests.kernels.engines.model_engine import distance, hugging_face_model, own_fixture
from tests.kernels.operations import ISAS, guarded, load, stream_of, unguard
from tests.kernels.weights import nmse
from tests.support.models.hugging_face_model import read_model, write_family, write_model, write_qwen2_moe
from tests.support.models.peft_adapters import ATTENTION, EXPERTS, ROUTER, logits_of, write_adapter


def settings(*, rank: int = 8, parameters: bool = True, **more: Any) -> dict[str, Any]:
    targets = {"target_parameters": [ROUTER, *EXPERTS]} if parameters else {}
    return {"r": rank, "lora_alpha": 16, "target_modules": ATTENTION} | targets | more


THREE = (
    settings(rank=8),
    settings(
        rank=6, parameters=False, use_rslora=True, rank_pattern={"k_proj": 12}, alpha_pattern={"q_proj": 5}
    ),
    settings(rank=3, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
)


@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_is_the_reference(isa: str) -> None:
    torch.manual_seed(1)
    n, cols, rows = 11, 64, 80
    adapters = torch.tensor([2, -1, 0, 1, 1, -1, 2, 0, 0, 2, -1], dtype=torch.int32)
    pairs = [(torch.randn(rank, cols), torch.randn(rows, rank)) for rank in (8, 5)] + [None]
    stream = stream_of(isa)
    table = LoraTable(cols, rows, 1, 3)
    held = []
    for number, pair in enumerate(pairs):
        if pair is not None:
            held.append(to_panels(pair))
            table.set(number, 0, *held[-1])
    x, out = torch.randn(n, cols), guarded(n, rows)
    out[:n] = torch.randn(n, rows)
    expected = add_adapters(x, adapters, pairs, out[:n])
    sorted_rows = adapter_rows(adapters.numpy())
    stream.lora(load(x), n, sorted_rows, [table, None], [out, out], torch.empty(2 * n * 8))
    stream.wait()
    unguard(out)
    torch.testing.assert_close(out[:n], expected, rtol=1e-5, atol=1e-4)


def test_three_adapters_and_none_in_a_step_are_what_peft_computes(tmp_path: Path) -> None:
    """A model of floats, so that there is no rounding but that of k and v."""
    folder = tmp_path / "model"
    write_model(folder, torch.float32)
    base = read_model(folder)
    models = [write_adapter(tmp_path / f"a{i}", base, i, **one) for i, one in enumerate(THREE)]
    engine = Engine(folder, [adapter_of(tmp_path / f"a{i}", folder) for i in range(3)])
    found = engine.logits(PROMPTS, [2, 0, -1, 1])
    for model, prompt, ours in zip((models[2], models[0], base, models[1]), PROMPTS, found, strict=True):
        assert nmse(ours, logits_of(model, prompt)) < 1e-5  # k and v are rounded to 16 bits
    assert nmse(found[0], logits_of(base, PROMPTS[0])) > 1e-2


@pytest.mark.parametrize("isa", ISAS)
def test_an_answer_is_the_same_to_the_bit_alone_and_in_a_crowd(isa: str, tmp_path: Path) -> None:
    base = hugging_face_model(open_gguf(TINY_MODEL), read_shape(open_gguf(TINY_MODEL)))
    for i, one in enumerate(THREE):
        write_adapter(tmp_path / f"a{i}", base, i, **one)
    adapters = [adapter_of(tmp_path / f"a{i}", TINY_MODEL) for i in range(3)]
    crowd = Engine(TINY_MODEL, adapters, isa).logits(PROMPTS, [2, 0, -1, 1])
    alone = Engine(TINY_MODEL, adapters, isa, threads=3)
    for prompt, adapter, ours in zip(PROMPTS, (2, 0, -1, 1), crowd, strict=True):
        assert torch.equal(alone.logits([prompt], [adapter])[0], ours)
    assert torch.equal(Engine(TINY_MODEL, [], isa).logits([PROMPTS[2]], [-1])[0], crowd[2])


def test_the_distance_from_peft_is_that_of_the_model_itself(tmp_path: Path) -> None:
    """For the quantised fixture; PEFT computes with the dequantised weights."""
    base = hugging_face_model(open_gguf(TINY_MODEL), read_shape(open_gguf(TINY_MODEL)))
    models = [write_adapter(tmp_path / f"a{i}", base, i, size=0.015, **one) for i, one in enumerate(THREE)]
    engine = Engine(TINY_MODEL, [adapter_of(tmp_path / f"a{i}", TINY_MODEL) for i in range(3)])
    medians: list[float] = []
    for adapter, model in enumerate([base, *models], -1):
        kl = []
        for case in own_fixture().tokens:
            tokens = case[:MOST]
            truth = logits_of(model, tokens)
            kl.append(distance(truth, engine.logits([tokens], [adapter])[0])[0])
            if adapter >= 0:  # it changes more than rounding does
                assert distance(truth, logits_of(base, tokens))[0].mean() > 5 * medians[0]
        medians.append(torch.cat(kl).median().item())
    print("median KL:", ", ".join(f"{median:.2e}" for median in medians))
    assert max(medians[1:]) < 1.25 * medians[0]


def test_dense_feed_forwards_and_shared_experts(tmp_path: Path) -> None:
    dense, shared = tmp_path / "dense", tmp_path / "shared"
    write_family(dense, "qwen3", torch.float32)
    write_qwen2_moe(shared, torch.float32)
    for folder, targets in (
        (dense, {"target_modules": ["gate_proj", "up_proj", "down_proj", "v_proj"]}),
        (
            shared,
            {
                "target_modules": [
                    "shared_expert.gate_proj",
                    "shared_expert.up_proj",
                    "shared_expert.down_proj",
                ]
            },
        ),
    ):
        base = read_model(folder)
        name = tmp_path / f"adapter-{folder.name}"
        model = write_adapter(name, base, 3, r=4, lora_alpha=8, **targets)
        engine = Engine(folder, [adapter_of(name, folder)])
        ours, plain = engine.logits(PROMPTS[:2], [0, -1])
        assert nmse(ours, logits_of(model, PROMPTS[0])) < 1e-5
        assert nmse(plain, logits_of(base, PROMPTS[1])) < 1e-5


def test_a_module_for_each_expert(tmp_path: Path) -> None:
    """As checkpoints had experts before transformers 5: the same products in other words."""
    folder, fused, single = tmp_path / "model", tmp_path / "fused", tmp_path / "single"
    write_model(folder, torch.float32)
    base = read_model(folder)
    model = write_adapter(fused, base, 5, r=4, lora_alpha=8, target_parameters=EXPERTS, target_modules=[])
    by_expert = _by_expert(load_file(fused / "adapter_model.safetensors"), base.config.num_experts)
    single.mkdir()
    save_file(by_expert, single / "adapter_model.safetensors")
    config = json.loads((fused / "adapter_config.json").read_text())
    (single / "adapter_config.json").write_text(json.dumps(config))
    engine = Engine(folder, [adapter_of(fused, folder), adapter_of(single, folder)])
    one, other = engine.logits([PROMPTS[0], PROMPTS[0]], [0, 1])
    assert torch.equal(one, other)
    assert nmse(one, logits_of(model, PROMPTS[0])) < 1e-5


def _by_expert(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        prefix = name.split(".experts")[0] + ".experts."
        for e in range(experts):
            of_a = a.view(experts, -1, a.shape[1])[e]
            of_b = b.view(b.shape[0], -1, experts)[:, :, e]
            is_down = a.shape[1] == 96
            parts = (
                {"down_proj": of_b}
                if is_down
                else dict(zip(("gate_proj", "up_proj"), of_b.chunk(2), strict=True))
            )
            for part, rows in parts.items():
                found[f"{prefix}{e}.{part}.lora_A.weight"] = of_a.clone()
                found[f"{prefix}{e}.{part}.lora_B.weight"] = rows.clone().contiguous()
    return found

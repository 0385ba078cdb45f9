"""LoRA adapters on the GPU engine under Triton's interpreter (on a GPU where there is one): what the CPU's engine
computes with them, whose truth is PEFT (`test_adapters.py`). Random weights and adapters of a very small shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from benchmarks.header import qwen3moe, write_header
from benchmarks.random_adapters import write_random_adapter
from moeserve.adapters.products import QKV_PARTS
from moeserve.config import ServerConfig
from moeserve.kernels.launch import first_launches
from moeserve.models.interface import ModelShape
from moeserve.models.open import open_dummy_model
from moeserve.models.sources.gguf import names as n
from moeserve.worker.gpu_loading import load_gpu_runner
from moeserve.worker.loading import load_cpu_runner
from moeserve.worker.runner import Runner
from tests.gpu.driver import small_config
from tests.support.adapter_steps import assert_near, score_together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ATTENTION = (*QKV_PARTS, n.ATTN_OUTPUT)
FEED_FORWARD = (n.FFN_GATE_INP, *n.EXPERT_PARTS)
PROMPTS = [
    [(7 * i * i + 3 * i + 5 * s) % 128 for i in range(length)] for s, length in enumerate((20, 17, 18, 15))
]
ADAPTERS = ["all", "", "attention", "down"]  # of each prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_header(path, shape_of())
    return path


def shape_of() -> ModelShape:
    """A layer, 4 experts of which a token takes 2."""
    return qwen3moe(
        hidden_size=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128, num_experts=4, top_k=2,
        expert_width=256, context_length=128, vocab_size=128,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_random_adapter(folder / "attention", shape_of(), 3, 1, parts=ATTENTION, size=0.5)
    write_random_adapter(folder / "all", shape_of(), 20, 2, parts=(*ATTENTION, *FEED_FORWARD), size=0.3)
    write_random_adapter(folder / "down", shape_of(), 8, 3, parts=(n.FFN_DOWN_EXPS,), size=0.6)
    return folder


def config_of(model: Path, folder: Path, **options: object) -> ServerConfig:
    modules = [f"{name}={folder / name}" for name in ("attention", "all", "down")]
    return small_config(
        model, load_format="dummy", threads=1, max_num_seqs=4, max_num_batched_tokens=128, max_model_len=64,
        max_total_tokens=256, lora_modules=tuple(modules), **options,
    )  # fmt: skip


def on_gpu(config: ServerConfig) -> Runner:
    return load_gpu_runner(
        config, open_dummy_model(Path(config.model)), lambda *_: None, torch.device(DEVICE)
    )


def test_adapters_and_the_base_in_a_step(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in steps of 70 rows, whose routes are sorted, of 28, and of 8; then tokens in recorded steps."""
    monkeypatch.setattr(
        "moeserve.worker.engines.gpu.RECORDED_PROMPT_ROWS", 32
    )  # the interpreter takes seconds each
    cpu = load_cpu_runner(config_of(model, folder), lambda *_: None)
    expected, plain = (score_together(cpu, PROMPTS, names, 32) for names in (ADAPTERS, [""] * 4))
    runner = on_gpu(config_of(model, folder, num_gpu_experts=4))
    launched = first_launches()
    for chunk in (32, 7, 2):
        found = score_together(runner, PROMPTS, ADAPTERS, chunk)
        for prompt, adapter in enumerate(ADAPTERS):
            assert_near(found[prompt], expected[prompt], within=0.1)
            changes = max(
                abs(a.logprob - b.logprob) for a, b in zip(expected[prompt], plain[prompt], strict=True)
            )
            assert (changes > 0.5) == bool(adapter)
    assert first_launches() == launched  # all was compiled before the first request

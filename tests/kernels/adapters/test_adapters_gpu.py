"""LoRA adapters on the GPU engine under Triton's interpreter (on a GPU where there is one): what the CPU's engine
computes with them, whose truth is PEFT (`test_adapters.py`). Random weights and adapters of a very small shape."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config import ServerConfig
from moeserve.kernels.launch import first_launches
from moeserve.messages.sampling import TokenLogprob
from moeserve.models.adapters.products import QKV_PARTS
from moeserve.models.open import open_dummy_model
from moeserve.models.sources.gguf import names as n
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import GREEDY, Driver, small_config
from tests.support.models.model_header import qwen3moe, write_header
from tests.support.models.random_adapters import write_random_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # minutes of CPU time each
SHAPE = qwen3moe(
    hidden_size=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128, num_experts=4, top_k=2,
    expert_width=256, context_length=128, vocab_size=128,
)  # fmt: skip
KINDS = {
    "qkv": QKV_PARTS,
    "o": (n.ATTN_OUTPUT,),
    "router": (n.FFN_GATE_INP,),
    "gate": n.EXPERT_PARTS[:1],
    "up": n.EXPERT_PARTS[1:2],
    "down": n.EXPERT_PARTS[2:],
}
ADAPTERS = [*KINDS, ""]  # of each prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_header(folder / "small.gguf", SHAPE)
    for seed, (name, parts) in enumerate(KINDS.items()):
        write_random_adapter(folder / name, SHAPE, 20, seed, parts=parts, size=0.4)
    return folder


def config_of(folder: Path, **options: object) -> ServerConfig:
    modules = tuple(f"{name}={folder / name}" for name in KINDS)
    return small_config(
        folder / "small.gguf", load_format="dummy", threads=1, max_num_seqs=8, max_model_len=64,
        max_total_tokens=256, lora_modules=modules, **options,
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(2, 1, 1, 1, 1, 1, 1), (12, 11, 12, 11, 12, 11, 10)], ids=sum)
def test_each_kind_of_product_and_the_base_in_a_step(
    folder: Path, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph of 8 rows, each by itself, and one whose rows and routes are multiplied in blocks."""
    monkeypatch.setattr("moeserve.worker.engines.gpu.steps.prompt_tiles.GRAPH_PROMPT_ROWS", 16)
    prompts = [[(7 * i * i + 3 * i + 5 * s) % 128 for i in range(length)] for s, length in enumerate(lengths)]
    config = config_of(folder, max_num_batched_tokens=max(16, sum(lengths)))
    cpu = load_cpu_runner(config, lambda *_: None)
    expected, plain = last_of(cpu, prompts, ADAPTERS), last_of(cpu, prompts, [""] * len(prompts))
    on_gpu = config_of(folder, max_num_batched_tokens=max(16, sum(lengths)), num_gpu_experts=4)
    runner = load_gpu_runner(
        on_gpu, open_dummy_model(folder / "small.gguf"), lambda *_: None, torch.device(DEVICE), Start()
    )
    launched = first_launches()
    found = last_of(runner, prompts, ADAPTERS)
    assert first_launches() == launched  # all was compiled before the first request
    for name, ours, truth, base in zip(ADAPTERS, found, expected, plain, strict=True):
        near, far = distance(ours, truth), distance(base, truth)
        print(f"{name or 'base'}: {near:.4f}, what the adapter changes {far:.4f}")
        assert near < 0.05
        assert not name or near < far / 2  # without the adapter they would be equal


def last_of(runner: Runner, prompts: list[list[int]], adapters: list[str]) -> list[TokenLogprob]:
    """What is predicted after each prompt with the adapter of this name ("": the model itself). All prompts are one
    step."""
    driver, keys = Driver(runner), runner.ready().adapters | {"": ""}
    new = [
        msgspec.structs.replace(driver.new(slot, prompt, GREEDY), adapter=keys[adapter])
        for slot, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    rows = [driver.row(slot, len(prompt), sample=True) for slot, prompt in enumerate(prompts)]
    found = [sampled.logprob for sampled in driver.step(new, rows).sampled]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def distance(ours: TokenLogprob, truth: TokenLogprob) -> float:
    """The median difference over the most likely tokens that both have."""
    theirs = dict(zip(truth.top_ids, truth.top_logprobs, strict=True))
    pairs = zip(ours.top_ids, ours.top_logprobs, strict=True)
    return float(np.median([abs(logprob - theirs[token]) for token, logprob in pairs if token in theirs]))

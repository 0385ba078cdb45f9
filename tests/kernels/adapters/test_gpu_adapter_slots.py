"""The adapters of a GPU engine by slot: where their matrices are, what is refused, which CUDA graphs they need."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.adapters import AdapterSource, AdaptersReport, AdaptersWanted
from moeserve.models.adapters.adapter import ProductKey
from moeserve.models.adapters.errors import AdapterError
from moeserve.models.adapters.open import open_adapter
from moeserve.models.adapters.products import QKV_PARTS
from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.lora import GpuAdapterMatrices, GpuAdapters
from moeserve.models.sources.gguf import names as n
from moeserve.placement import LayerPlacement, Placement
from moeserve.worker.adapters.gpu import load_gpu_adapters, scopes_to_capture
from moeserve.worker.adapters.memory import plan_gpu_adapters, refuse_adapters
from moeserve.worker.adapters.resident import ResidentAdapters
from tests.support.models.model_header import qwen3moe
from tests.support.models.random_adapters import write_random_adapter

SHAPE = qwen3moe(
    hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, num_experts=4, top_k=2, expert_width=96,
    vocab_size=300,
)  # fmt: skip
ATTENTION, ROUTER, EXPERTS = AdapterScope.ATTENTION, AdapterScope.ROUTER, AdapterScope.ROUTED_EXPERTS
ALL = ATTENTION | ROUTER | EXPERTS
KINDS = {"attention": (*QKV_PARTS, n.ATTN_OUTPUT), "router": (n.FFN_GATE_INP,), "experts": n.EXPERT_PARTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, parts) in enumerate(KINDS.items()):
        write_random_adapter(folder / name, SHAPE, 5, seed, parts=parts, size=0.1)
    write_random_adapter(folder / "wide", SHAPE, 33, 9, parts=KINDS["router"], size=0.1)
    return folder


def slots_of(*scopes: AdapterScope, rank: int = 32, experts_in_ram: bool = False) -> GpuAdapters:
    return GpuAdapters(
        SHAPE, 2, rank, torch.float32, torch.device(DEVICE), scopes, experts_in_ram=experts_in_ram
    )


def test_the_table_says_where_matrices_are(folder: Path) -> None:
    slots, adapter = slots_of(ALL), open_adapter("a", folder / "experts", SHAPE).read()
    matrices = slots.prepare(adapter)
    slots.put(1, matrices)
    table = slots.table(1, n.EXPERT_PARTS[:2])
    assert table is not None
    assert (table.parts, table.experts, table.cols, table.rank) == (2, 4, 64, 32)
    for part, name in enumerate(n.EXPERT_PARTS[:2]):
        for expert in range(4):
            pair = adapter.products[ProductKey(1, name, expert)]
            a, b, rank, _ = table.entries[1, part * 4 + expert].tolist()
            assert rank == 16
            assert a % 16 == b % 16 == 0
            flat, start = matrices.matrices.cpu(), matrices.matrices.data_ptr()
            of_a = flat[(a - start) // 4 :][: rank * 64].view(rank, 64)
            of_b = flat[(b - start) // 4 :][: 96 * rank].view(96, rank)
            assert torch.equal(of_a[:5], torch.from_numpy(pair.a))
            assert torch.equal(of_b[:, :5], torch.from_numpy(pair.b))
            assert not of_a[5:].any()
            assert not of_b[:, 5:].any()
    assert not table.entries[0].any()
    slots.remove(1)
    assert not table.entries.any()


def test_a_step_takes_the_least_scope_that_its_rows_need(folder: Path) -> None:
    slots = slots_of(ATTENTION, ATTENTION | ROUTER, ALL)
    for slot, name in enumerate(("attention", "router")):
        slots.put(slot, slots.prepare(open_adapter(name, folder / name, SHAPE).read()))
    assert slots.scope_for([-1, -1]) == AdapterScope.NONE
    assert slots.scope_for([-1, 0]) == ATTENTION
    assert slots.scope_for([1]) == slots.scope_for([0, 1]) == ATTENTION | ROUTER


def test_what_is_captured(folder: Path) -> None:
    def scopes(*names: str, experts_in_ram: bool = False, **options: object) -> list[AdapterScope]:
        config = ServerConfig(lora_modules=tuple(f"{name}={folder / name}" for name in names), **options)
        plan = plan_gpu_adapters(config, SHAPE, 2)
        assert plan is not None
        return scopes_to_capture(config, plan.checked, SHAPE, experts_in_ram=experts_in_ram)

    assert scopes("attention") == [ATTENTION]
    assert scopes("router") == [ROUTER]
    assert scopes("attention", "router") == [ATTENTION, ATTENTION | ROUTER]
    assert scopes(lora_dir=str(folder)) == [ATTENTION, ALL]
    assert scopes(lora_dir=str(folder), experts_in_ram=True) == [ATTENTION, ATTENTION | ROUTER]
    assert plan_gpu_adapters(ServerConfig(), SHAPE, 2) is None


def test_refusals(folder: Path) -> None:
    experts, wide = (open_adapter(name, folder / name, SHAPE) for name in ("experts", "wide"))
    with pytest.raises(AdapterError, match=r"experts.*some of which are in RAM"):
        slots_of(ALL, experts_in_ram=True).check(experts)
    slots_of(ALL, experts_in_ram=True).check(open_adapter("a", folder / "attention", SHAPE))
    with pytest.raises(AdapterError, match=r"rank 33.*up to 32"):
        slots_of(ALL).check(wide)
    config = ServerConfig(lora_modules=(f"wide={folder / 'wide'}",))
    with pytest.raises(ConfigError, match="--lora-modules: adapters do not work with several GPUs"):
        refuse_adapters(config)
    sandwiched = replace(SHAPE, layers=tuple(replace(layer, is_sandwiched=True) for layer in SHAPE.layers))
    with pytest.raises(ConfigError, match="adapters of qwen3moe run on the CPU only"):
        plan_gpu_adapters(config, sandwiched, 4)
    in_ram = Placement("cuda", (LayerPlacement("cpu", 4), LayerPlacement("cuda", 4)), "cuda", 0, 0)
    plan = plan_gpu_adapters(config, SHAPE, 4)
    with pytest.raises(ConfigError, match="the first 1 layers are in RAM"):
        load_gpu_adapters(config, plan, SHAPE, in_ram, torch.float32, torch.device(DEVICE))


def test_adapters_come_and_go(folder: Path) -> None:
    """As the router orders them: one that is too large for what is left is refused, and its room is free again when
    another has gone."""
    slots = slots_of(ATTENTION, ALL)
    attention, experts = (open_adapter(name, folder / name, SHAPE) for name in ("attention", "experts"))
    budget = slots.needed_bytes(experts)
    resident = ResidentAdapters(slots, [], budget)
    first = AdapterSource(1, "attention", str(folder / "attention"))
    (state,) = settled(resident, [first]).states
    assert state.num_bytes == slots.needed_bytes(attention)
    assert slots.scope_for([resident.numbers[state.key]]) == ATTENTION
    second = AdapterSource(2, "experts", str(folder / "experts"))
    assert "more of --lora-memory" in (settled(resident, [first, second]).states[1].error or "")
    third = AdapterSource(3, "experts", str(folder / "experts"))
    (state,) = settled(resident, [third]).states
    assert state.error is None
    assert slots.scope_for([resident.numbers[state.key]]) == ALL


def settled(resident: ResidentAdapters[GpuAdapterMatrices], sources: list[AdapterSource]) -> AdaptersReport:
    """Asked again and again, as the router does, until each is there or refused."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        report = resident.want(AdaptersWanted(sources))
        if all(state.key or state.error for state in report.states):
            return report
        time.sleep(0.01)
    raise TimeoutError("adapters are still being read")

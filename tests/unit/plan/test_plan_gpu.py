"""`moeserve plan` for a GPU: what goes there, what stays in RAM, and the tiers behind it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.cli.main import main
from moeserve.cli.plan.tower import CUDA_LIBRARIES_BYTES, VISUALSERVER_BYTES
from moeserve.config import ServerConfig
from moeserve.kv.layout import KvLayout
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.adapters.sizes import gpu_table_bytes
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement import ModelSizes
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES, gpu_reserved_bytes
from moeserve.placement.expert_cache.generate import PRESETS, UNIFORM, generate
from moeserve.placement.expert_cache.routing_trace import write_trace
from moeserve.placement.step_tokens import step_tokens
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.tower_memory import cpu_bytes, gpu_bytes, takes_block_float
from tests.conftest import TINY_MODEL
from tests.support.models.gemma_file import write_gemma
from tests.support.models.model_header import QWEN3_30B_A3B
from tests.support.models.peft_files import SHAPE
from tests.support.models.peft_files import write as write_peft
from tests.support.pictures.picture_fixture import MODEL as PICTURED
from tests.support.pictures.picture_fixture import TOWER
from tests.support.router.plan_command import fails, run


@pytest.mark.usefixtures("no_measuring")
def test_two_kv_pools_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gemma = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    flags = ["--model", str(gemma), "--gpu-memory", "1.2", "--max-num-seqs", "2", "--ram", "9"]
    flags += ["--max-num-batched-tokens", "64", "--max-total-tokens", "4000"]
    shown = run(capsys, *flags)
    memory = shown["memory"]
    assert (memory["kv_tokens"], memory["window_slots"]) == (4000, 1333)
    assert memory["gpu_kv"] == 256 * (4000 + 1333)
    assert memory["ram_tier"] == 0  # behind one pool alone
    assert run(capsys, *shlex.split(shown["command"])[1:], "--gpu-memory", "1.2")["memory"] == memory
    memory = run(capsys, *flags, "--kv-ram", "1")["memory"]
    assert (memory["window_slots"], memory["gpu_kv"], memory["ram_tier"]) == (0, 512 * 4000, 1 << 30)


@pytest.mark.usefixtures("no_measuring")
def test_with_a_gpu(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    shown = run(capsys, "--model", str(tiny_model), "--gpu-memory", "1.2", "--num-gpu-experts", "6")
    assert shown["tensors"]["blk.0.ffn_gate_exps.weight"] == "cuda: 6 of 8 experts, cpu: the rest"
    assert shown["tensors"]["output.weight"] == "cuda"
    assert shown["memory"]["gpu"] <= 1.2 * 2**30
    assert shown["cautions"]
    assert main(["plan", "--model", str(tiny_model), "--gpu-memory", "1.2", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "blk.2.ffn_down_exps.weight" in text
    assert "8 of 8 experts on cuda" in text


@pytest.mark.usefixtures("no_measuring")
def test_the_last_layer_on_a_gpu(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--gpu-memory", "1.2", "--n-gpu-layers", "1"]
    flags += ["--max-total-tokens", "1000"]
    shown = run(capsys, *flags)
    assert [shown["tensors"][f"blk.{i}.attn_q.weight"] for i in range(3)] == ["cpu", "cpu", "cuda"]
    assert (shown["tensors"]["token_embd.weight"], shown["tensors"]["output.weight"]) == ("cpu", "cuda")
    memory, layer_kv = shown["memory"], 1000 * 2 * 2 * 128 * 2
    assert (memory["ram_kv"], memory["gpu_kv"]) == (2 * layer_kv, layer_kv)
    assert "--n-gpu-layers 1" in shown["command"]
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    assert re.search("layers 0 to 1 +attention and router on cpu, experts on cpu\n", text)
    assert "contradicts --device cpu" in fails(capsys, *flags[:4], "--n-gpu-layers", "0")  # none: the CPU


@pytest.mark.usefixtures("no_measuring")
def test_adapters_count_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Theirs are the GPU's memory and the steps' buffers, and no RAM."""
    adapter = write_peft(tmp_path / "a", r=2)
    flags = ["--model", str(TINY_MODEL), "--gpu-memory", "40"]
    without = run(capsys, *flags)["memory"]
    later = ["--lora-dir", str(tmp_path), "--lora-memory", "0.125"]
    shown = run(capsys, *flags, "--lora-modules", f"a={adapter}", *later)["memory"]
    matrices = sum(
        size.copies * 16 * (size.cols + size.rows) * 2 for size in PeftAdapter("a", adapter, SHAPE).sizes
    )
    table = gpu_table_bytes(SHAPE, 16)
    assert shown["gpu_adapters"] == matrices + table + (1 << 27)
    assert without["gpu_adapters"] == shown["ram_adapters"] == shown["ram_later_adapters"] == 0
    assert shown["gpu_other"] > without["gpu_other"]
    assert main(["plan", *flags, *later]) == 0
    assert "GPU, LoRA adapters" in capsys.readouterr().out


@pytest.mark.usefixtures("no_measuring")
def test_a_tower_counts_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """In 16 bits, with its process's context and a picture, taken off what the model may have."""
    pytest.importorskip("torch", reason="the kernels say whether this CPU has block floating point")
    flags = ["--model", str(PICTURED), "--gpu-memory", "16", "--mmproj", "auto", "--ram", "9"]
    flags += ["--max-num-seqs", "32"]
    shown, on_cpu = run(capsys, *flags)["memory"], run(capsys, *flags, "--mmproj-device", "cpu")["memory"]
    _, tower = open_tower(TOWER)
    assert shown["gpu_tower"] == gpu_bytes(tower, 4096) + CUDA_CONTEXT_BYTES
    needed = cpu_bytes(tower, 4096, is_block_float=takes_block_float("auto"))
    assert (on_cpu["gpu_tower"], on_cpu["ram_tower"]) == (0, VISUALSERVER_BYTES + needed)
    assert shown["ram_tower"] == VISUALSERVER_BYTES + CUDA_LIBRARIES_BYTES
    small = [*flags[:2], "--gpu-memory", "2", *flags[4:]]
    without = run(capsys, *small)["memory"]
    assert without["gpu_tower"] == 0  # it would be more than an eighth
    # What is left is what a GPU that is smaller by the tower has.
    left = 2 - shown["gpu_tower"] / (1 << 30)
    beside = run(capsys, *small, "--mmproj-device", "cuda")["memory"]
    alone = run(capsys, *flags[:2], "--gpu-memory", f"{left}", *flags[4:], "--mmproj-device", "cpu")["memory"]
    assert beside["gpu_states"] == alone["gpu_states"] < without["gpu_states"]
    budget = [*flags, "--gpu-memory-budget", "1.5"]
    with_budget = [run(capsys, *budget, "--mmproj-device", device)["memory"] for device in ("cuda", "cpu")]
    assert with_budget[0]["gpu_states"] < with_budget[1]["gpu_states"]
    assert main(["plan", *flags]) == 0
    assert "GPU, vision tower" in capsys.readouterr().out
    assert "the vision tower alone" in fails(capsys, *flags, "--gpu-memory-budget", "0.5")


@pytest.mark.usefixtures("no_measuring")
def test_tiers_behind_a_gpu(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    gpu = ("--model", str(tiny_model), "--gpu-memory", "40", "--ram", "8", "--pcie-bandwidth", "20")
    found = run(capsys, *gpu, "--kv-ram", "2", "--kv-disk", "/no/such/folder")
    token_bytes = 6 * 2 * 2 * 64 * 2
    ram = found["tiers"]["ram"]
    assert ram["tokens"] == (2 << 30) // token_bytes
    assert ram["load_s"] == pytest.approx(ram["prompt"] * token_bytes / 20e9)
    assert found["tiers"]["disk"]["tokens"] == (10 << 30) // token_bytes
    none = run(capsys, *gpu, "--kv-ram", "0")
    assert none["tiers"] == {}
    assert none["memory"]["ram_full"] == found["memory"]["ram_full"] - (2 << 30)
    by_itself = run(capsys, *gpu)["memory"]
    assert by_itself["ram_tier"] == 4 * by_itself["gpu_kv"]
    assert "--kv-ram 9: " in fails(capsys, *gpu, "--kv-ram", "9")


def test_a_full_gpu_has_room_for_what_its_allocator_loses(tiny_model: Path) -> None:
    """3.1 GiB beside 134 GiB of weights were lost once; of a model that is larger than the GPU, of what fits."""
    gguf = open_gguf(tiny_model)
    model = read_shape(gguf)
    sizes = ModelSizes.of(gguf.tensors, KvLayout(model))
    of_all = sum(tensor.nbytes for tensor in gguf.tensors.values())
    assert sizes.gpu_bytes == pytest.approx(of_all, rel=0.1)

    def reserved(usable: int, *, on_cuda: bool = True) -> int:
        return gpu_reserved_bytes(
            ServerConfig(), model, 512, sizes, usable, float_weights=False, on_cuda=on_cuda
        )

    assert reserved(2 * of_all) - reserved(0) >= 3.1 / 134 * sizes.gpu_bytes
    assert 3.1 / 134 * 1000 <= reserved(1000) - reserved(0) < 50
    assert reserved(2 * of_all, on_cuda=False) == reserved(0, on_cuda=False)


@pytest.mark.usefixtures("no_measuring")
def test_a_gpu_that_is_too_small_for_all_layers(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    gguf = open_gguf(tiny_model)
    model = read_shape(gguf)
    sizes = ModelSizes.of(gguf.tensors, KvLayout(model))
    kv = 2048 * sizes.layers[0].kv  # of a layer, for the whole context
    two = sizes.head.cuda + sum(layer.dense.cuda + kv for layer in sizes.layers[1:])
    budget = (
        gpu_reserved_bytes(ServerConfig(), model, 512, sizes, 2 << 30, float_weights=False)
        + two
        + sizes.layers[0].dense.cuda // 2
    )
    flags = [
        "--gpu-memory",
        "2",
        "--gpu-memory-budget",
        str(budget / 2**30),
        "--max-num-batched-tokens",
        "512",
    ]
    shown = run(capsys, "--model", str(tiny_model), *flags)
    assert [shown["tensors"][f"blk.{i}.attn_q.weight"] for i in range(3)] == ["cpu", "cuda", "cuda"]
    assert shown["memory"]["kv_tokens"] >= 2048


@pytest.mark.parametrize(
    ("gib", "tokens"),
    [
        (None, 512),
        (139, 16384),
        (71, 16384),
        (70, 8192),
        (36, 8192),
        (35, 4096),
        (18, 4096),
        (12, 2048),
        (5, 1024),
        (4, 512),
        (1, 512),
    ],
)
def test_a_step_takes_what_its_buffers_leave_room_for(gib: int | None, tokens: int) -> None:
    assert step_tokens(None, QWEN3_30B_A3B, None if gib is None else gib << 30) == tokens
    assert step_tokens(700, QWEN3_30B_A3B, None if gib is None else gib << 30) == 700


@pytest.mark.usefixtures("no_measuring")
def test_the_expert_cache_is_predicted_from_a_trace(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    """As a text repeats its experts, they are found on the GPU, and answers are faster; without a trace a plan says
    what it has assumed."""
    flags = ["--model", str(tiny_model), "--gpu-memory", "1.2", "--num-gpu-experts", "4", "--ram", "8"]
    shape = {"layers": 3, "experts": 8, "top_k": 2}
    trace = ["--routing-trace", str(tmp_path / "local")]
    decode, hits, first = {}, {}, {}
    for name, distances in PRESETS.items():
        write_trace(tmp_path / name, generate(distances, name, tokens=600, **shape))
        speed = run(capsys, *flags, "--routing-trace", str(tmp_path / name))["speed"]
        decode[name], hits[name] = speed["decode"]["1"], speed["hit_rates"]["1"]
        first[name] = speed["decode_at_first"]["1"], speed["hit_rates_at_first"]["1"]
    said = run(capsys, *flags, *trace)["cautions"]
    assert any("too few tokens for 16 at once" in caution and "record 2,048" in caution for caution in said)
    assert 0.4 < hits["uniform"] < 0.6
    assert hits["local"] > hits["uniform"]
    assert decode["local"] > decode["uniform"]
    assert hits["uniform"] < first["local"][1] < hits["local"]  # the cache begins with any experts
    assert first["local"][0] < decode["local"]
    assumed = run(capsys, *flags)
    assert any("--record-routing-trace" in caution for caution in assumed["cautions"])
    assert assumed["speed"]["hit_rates"].keys() == assumed["speed"]["decode"].keys() - {"64"}
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    rows = re.findall(
        r"^  (.*\S) +[\d,.]+ tokens/s(.*), \d+% of (.*) experts found on the GPU; [\d,.]+ over the",
        text,
        re.M,
    )
    assert rows[:2] == [("one answer", "", "its"), ("4 at once", " together", "their")]
    assert run(capsys, *flags, "--expert-cache", "off")["speed"]["decode_at_first"] == {}
    assert "no experts move in this plan" in fails(capsys, *flags, "--expert-cache", "off", *trace)
    write_trace(tmp_path / "other", generate(UNIFORM, "", tokens=600, layers=2, experts=8, top_k=2))
    assert "it records 2 layers of 8 experts" in fails(
        capsys, *flags, "--routing-trace", str(tmp_path / "other")
    )
    write_trace(tmp_path / "short", generate(UNIFORM, "", tokens=60, **shape))
    assert "60 tokens are too few; record at least 128" in fails(
        capsys, *flags, "--routing-trace", str(tmp_path / "short")
    )

"""`moeserve plan`: bytes and tokens that add up, files without their tensors."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.cli.main import main
from moeserve.cli.plan.memory import VISUALSERVER_BYTES
from moeserve.config import ServerConfig
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY
from moeserve.kv.layout import KvLayout
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.adapters.sizes import gpu_table_bytes
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement import ModelSizes
from moeserve.placement.engine_memory import gpu_reserved_bytes
from moeserve.placement.expert_cache.generate import PRESETS, UNIFORM, generate
from moeserve.placement.expert_cache.routing_trace import write_trace
from moeserve.placement.step_tokens import step_tokens
from tests.conftest import OWN_FIXTURES, TINY_MODEL
from tests.support import gguf_bytes
from tests.support.gemma_file import write_gemma
from tests.support.model_header import QWEN3_30B_A3B
from tests.support.peft_files import SHAPE
from tests.support.peft_files import write as write_peft
from tests.support.picture_fixture import MODEL as PICTURED
from tests.support.picture_fixture import TOWER
from tests.support.plan_command import fails, run


@pytest.mark.usefixtures("no_measuring")
def test_on_the_cpu(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    shown = run(capsys, "--model", str(tiny_model), "--ram", "4", "--max-num-seqs", "8", "--device", "cpu")
    gguf = open_gguf(tiny_model)
    assert set(shown["tensors"]) == set(gguf.tensors)
    assert set(shown["tensors"].values()) == {"cpu"}
    memory = shown["memory"]
    assert memory["ram_weights"] == shown["file_bytes"] == sum(t.nbytes for t in gguf.tensors.values())
    assert memory["kv_tokens"] == 8 * 2048
    assert memory["ram_kv"] == 8 * 2048 * 3 * 2 * 2 * 128 * 2
    assert memory["ram_full"] <= 4 << 30
    assert memory["gpu"] == 0
    assert shown["users"] == {"2048": 8}
    assert set(shown["speed"]["decode"]) == {"1", "4"}


@pytest.mark.usefixtures("no_measuring")
def test_two_kv_pools(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One layer with a window and one without, each of 256 bytes a token."""
    gemma = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    flags = ("--model", str(gemma), "--ram", "4", "--max-num-seqs", "2", "--device", "cpu")
    pools = ("--max-total-tokens", "4000", "--kv-window-ratio", "0.3")
    shown = run(capsys, *flags, *pools)
    memory = shown["memory"]
    assert (memory["kv_tokens"], memory["window_slots"]) == (4000, 1714)  # 30% of both
    assert "--kv-window-ratio 0.3" in shown["command"]  # without it, so many tokens might not fit
    assert memory["ram_kv"] == 256 * (4000 + 1714)
    memory = run(capsys, *flags, *pools[:2])["memory"]
    assert (memory["window_slots"], memory["ram_kv"]) == (1333, 256 * (4000 + 1333))  # by default a third
    memory = run(capsys, *flags, *pools[:2], "--kv-window-ratio", "0")["memory"]
    assert (memory["window_slots"], memory["ram_kv"]) == (0, 512 * 4000)
    assert main(["plan", *flags, *pools]) == 0
    assert re.search(r"KV, windowed layers +1,714 tokens", capsys.readouterr().out)
    assert "no room for more tokens" in fails(capsys, *flags, "--max-total-tokens", "1000", *pools[2:])


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
def test_the_command_line_is_one_that_the_server_takes(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    asked = ["--model", str(tiny_model), "--gpu-memory", "1.2", "--num-gpu-experts", "5", "--ram", "3"]
    name, *flags = shlex.split(run(capsys, *asked)["command"])
    assert name == "moeserve"
    for flag in ("--num-gpu-experts", "--gpu-memory-budget", "--max-total-tokens"):
        assert flag in flags
    again = run(capsys, *flags, "--gpu-memory", "1.2", "--ram", "3")
    assert [len(experts) for experts in again["gpu_experts"]] == [5, 5, 5]


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
def test_recurrent_states_lie_where_their_layers_are(capsys: pytest.CaptureFixture[str]) -> None:
    """The first three layers have states; 4 snapshots for each sequence fit. Measured: the first layer has no q."""
    model = OWN_FIXTURES / "tiny-qwen3next-q4_k_m.gguf"
    state = 4 * (4 * 128 * 128 + 3 * 1024)  # bytes in a layer
    flags = ["--model", str(model), "--max-num-seqs", "2", "--max-total-tokens", "500", "--ram", "4"]
    memory = run(capsys, *flags, "--device", "cpu")["memory"]
    assert memory["ram_states"] == 2 * 5 * 3 * state
    assert memory["ram_kv"] == 500 * 2 * 256 * 2  # of the fourth layer
    assert memory["ram_full"] == memory["ram_start"] + memory["ram_kv"] + memory["ram_states"]
    memory = run(capsys, *flags, "--gpu-memory", "2", "--n-gpu-layers", "2")["memory"]
    assert (memory["ram_states"], memory["gpu_states"]) == (2 * 5 * 2 * state, 2 * 5 * state)
    assert (memory["ram_kv"], memory["gpu_kv"]) == (0, 500 * 2 * 256 * 2)
    none = ["--state-snapshot-budget", "0"]
    assert run(capsys, *flags, *none, "--device", "cpu")["memory"]["ram_states"] == 2 * 3 * state
    assert "--state-snapshot-budget" in fails(
        capsys, *flags, "--state-snapshot-budget", "100", "--gpu-memory", "2"
    )


@pytest.mark.usefixtures("no_measuring")
def test_the_type_of_the_kv_counts(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--device", "cpu", "--max-total-tokens", "512"]
    f16, q8_0 = (
        run(capsys, *flags, "--kv-cache-dtype", name)["memory"]["ram_kv"] for name in ("f16", "q8_0")
    )
    assert q8_0 / f16 == 34 / 64
    assert "--kv-cache-dtype fp8" in fails(capsys, *flags, "--kv-cache-dtype", "fp8")


@pytest.mark.usefixtures("no_measuring")
def test_a_tower_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """In float32, of whatever type its file is, with its process and a picture; and the embeddings that it keeps."""
    flags = ["--model", str(PICTURED), "--device", "cpu", "--max-total-tokens", "500", "--ram", "4"]
    without = run(capsys, *flags)["memory"]
    assert (without["ram_tower"], without["ram_images"]) == (0, 0)
    flags += ["--mmproj", "auto", "--image-cache", "0.25"]
    shown = run(capsys, *flags)
    memory = shown["memory"]
    floats = sum(math.prod(tensor.shape) for tensor in open_gguf(TOWER).tensors.values())
    picture = memory["ram_tower"] - VISUALSERVER_BYTES - 4 * floats
    small = run(capsys, *flags, "--image-max-tokens", "256")["memory"]
    assert picture > 0
    assert small["ram_tower"] == memory["ram_tower"] - picture * 15 // 16
    assert memory["ram_start"] == without["ram_start"] + memory["ram_tower"]
    assert memory["ram_full"] == without["ram_full"] + memory["ram_tower"] + (1 << 28)
    assert "--mmproj auto --image-cache 0.25" in shown["command"]
    assert main(["plan", *flags]) == 0
    assert "RAM, vision tower" in capsys.readouterr().out
    assert "not 'clip'" in fails(capsys, *flags[:-3], str(PICTURED))


@pytest.mark.usefixtures("no_measuring")
def test_adapters_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Those of the start, and what is kept free for others: the KV pool is the smaller for both."""
    adapter = write_peft(tmp_path / "a", r=2)
    flags = ["--model", str(TINY_MODEL), "--device", "cpu", "--ram", "0.8", "--max-num-seqs", "4096"]
    later = ["--lora-dir", str(tmp_path), "--lora-memory", "0.125"]
    without = run(capsys, *flags)["memory"]
    assert without["ram_adapters"] == without["ram_later_adapters"] == 0
    shown = run(capsys, *flags, "--lora-modules", f"a={adapter}", *later)
    memory = shown["memory"]
    assert memory["ram_later_adapters"] == 1 << 27
    assert memory["ram_start"] == without["ram_start"] + memory["ram_adapters"] > without["ram_start"]
    as_read = PeftAdapter("a", adapter, SHAPE).nbytes
    fewer = (memory["ram_adapters"] + as_read + (1 << 27)) * SHARE_OF_FREE_MEMORY
    assert without["ram_kv"] - memory["ram_kv"] == pytest.approx(fewer, rel=1e-3)
    assert f"--lora-modules a={adapter} --lora-dir {tmp_path}" in shown["command"]
    assert main(["plan", *flags, *later]) == 0
    assert "kept for adapters" in capsys.readouterr().out
    assert "has no effect without --lora-dir" in fails(capsys, *flags, "--lora-memory", "2")


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
def test_the_disk_tier(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    flags = (
        "--model",
        str(tiny_model),
        "--device",
        "cpu",
        "--kv-disk",
        "/no/such/folder",
        "--kv-disk-gib",
        "2",
    )
    disk = run(capsys, *flags, "--disk-bandwidth", "0.5")["tiers"]["disk"]
    token_bytes = 6 * 2 * 2 * 64 * 2  # layers, keys and values, heads, numbers, bytes
    assert disk["tokens"] == (2 << 30) // token_bytes
    assert disk["load_s"] == pytest.approx(disk["prompt"] * token_bytes / 0.5e9)
    assert disk["tokens_per_s"] == pytest.approx(0.5e9 / token_bytes)
    assert disk["compute_s"] > disk["load_s"]
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    assert "tokens in 2.00 GiB" in text
    assert "the disk's speed is assumed" in text
    without = ("--model", str(tiny_model), "--device", "cpu")
    assert run(capsys, *without)["tiers"] == {}
    assert "no RAM tier on the CPU engine" in fails(capsys, *without, "--kv-ram", "2")
    assert "has no effect without --kv-disk" in fails(capsys, *without, "--kv-disk-gib", "2")
    assert "--prefix-cache off switches off" in fails(capsys, *flags, "--prefix-cache", "off")
    assert run(capsys, *flags, "--prefix-cache", "per-key")["tiers"]["disk"]["tokens"] == disk["tokens"]


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


@pytest.mark.usefixtures("no_measuring")
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path) -> None:
    model = ["--model", str(tiny_model)]
    on_cpu = [*model, "--device", "cpu"]
    assert "GiB of RAM are needed" in fails(capsys, *on_cpu, "--ram", "0.2")
    assert "GiB of GPU memory do not suffice" in fails(capsys, *model, "--gpu-memory", "0.9")
    assert "there is nothing to place" in fails(capsys, *on_cpu, "--num-gpu-experts", "1")
    assert "there is no" in fails(capsys, "--model", str(tmp_path / "none.gguf"))
    assert "contradicts --device cpu" in fails(capsys, *model, "--gpu-memory", "9", "--device", "cpu")
    assert "must be above 0" in fails(capsys, *model, "--ram", "0")
    assert "must be above 0" in fails(capsys, *model, "--ram", "nan")


@pytest.mark.usefixtures("no_measuring")
def test_a_file_without_its_tensors(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    whole = tiny_model.read_bytes()
    first = min(tensor.offset for tensor in open_gguf(tiny_model).tensors.values())
    (tmp_path / "header.gguf").write_bytes(whole[:first])
    shown, full = (
        run(capsys, "--model", str(path), "--ram", "4", "--device", "cpu")
        for path in (tmp_path / "header.gguf", tiny_model)
    )
    for part in ("tensors", "memory", "users", "speed"):
        assert shown[part] == full[part]


@pytest.mark.usefixtures("no_measuring")
def test_a_split_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metadata, tensors = gguf_bytes.model_metadata(), gguf_bytes.model_tensors()
    (tmp_path / "one.gguf").write_bytes(gguf_bytes.gguf_bytes(metadata, tensors))
    for part, own in enumerate((tensors[:9], tensors[9:])):
        split = {"split.no": part, "split.count": 2, "split.tensors.count": len(tensors)}
        kept = metadata if part == 0 else {"general.architecture": "qwen3moe"}
        path = tmp_path / f"two-{part + 1:05d}-of-00002.gguf"
        path.write_bytes(gguf_bytes.gguf_bytes(kept | split, own))
    one, two = (
        run(capsys, "--model", str(tmp_path / name), "--ram", "2", "--device", "cpu")
        for name in ("one.gguf", "two-00001-of-00002.gguf")
    )
    assert one["tensors"] == two["tensors"]
    assert one["memory"] == two["memory"]


@pytest.mark.parametrize(
    ("gib", "tokens"),
    [(None, 512), (139, 8192), (36, 8192), (35, 4096), (18, 4096), (12, 2048), (5, 1024), (4, 512), (1, 512)],
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
    assert "experts stay where they are" in fails(capsys, *flags, "--expert-cache", "off", *trace)
    write_trace(tmp_path / "other", generate(UNIFORM, "", tokens=600, layers=2, experts=8, top_k=2))
    assert "it records 2 layers of 8 experts" in fails(
        capsys, *flags, "--routing-trace", str(tmp_path / "other")
    )
    write_trace(tmp_path / "short", generate(UNIFORM, "", tokens=60, **shape))
    assert "60 tokens are too few; record at least 128" in fails(
        capsys, *flags, "--routing-trace", str(tmp_path / "short")
    )

"""`moeserve plan` on the CPU: bytes and tokens that add up, files without their tensors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.cli.main import main
from moeserve.cli.plan.tower import VISUALSERVER_BYTES
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.sources.gguf import open_gguf
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.tower_memory import cpu_bytes, takes_block_float
from tests.conftest import OWN_FIXTURES, TINY_MODEL
from tests.support.models import gguf_bytes
from tests.support.models.gemma_file import write_gemma
from tests.support.models.peft_files import SHAPE
from tests.support.models.peft_files import write as write_peft
from tests.support.pictures.picture_fixture import MODEL as PICTURED
from tests.support.pictures.picture_fixture import TOWER
from tests.support.router.plan_command import fails, run


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
def test_a_file_that_was_not_downloaded_to_its_end(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(tiny_model.read_bytes()[:-100_000])
    for model, is_whole in ((tiny_model, True), (half, False)):
        cautions = run(capsys, "--model", str(model), "--ram", "4", "--device", "cpu")["cautions"]
        assert any("100,000 bytes are missing" in caution for caution in cautions) == (not is_whole)


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
    """Its weights as they are computed with, its process and a picture; and the embeddings that it keeps."""
    pytest.importorskip("torch", reason="the kernels say whether this CPU has block floating point")
    flags = ["--model", str(PICTURED), "--device", "cpu", "--max-total-tokens", "500", "--ram", "4"]
    without = run(capsys, *flags)["memory"]
    assert (without["ram_tower"], without["ram_images"]) == (0, 0)
    flags += ["--mmproj", "auto", "--image-cache", "0.25"]
    shown = run(capsys, *flags)
    memory = shown["memory"]
    _, tower = open_tower(TOWER)
    for tokens, taken in (
        (4096, memory["ram_tower"]),
        (256, run(capsys, *flags, "--image-max-tokens", "256")["memory"]["ram_tower"]),
    ):
        needed = cpu_bytes(tower, tokens, is_block_float=takes_block_float("auto"))
        assert taken == VISUALSERVER_BYTES + needed
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
def test_a_drafting_model_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights and buffers, and its KV, of which each token of the pool takes some."""
    flags = ["--model", str(TINY_MODEL), "--device", "cpu", "--ram", "0.8", "--max-num-seqs", "4096"]
    without = run(capsys, *flags)["memory"]
    drafting = ["--speculative-model", str(TINY_MODEL)]
    shown = run(capsys, *flags, *drafting)
    memory = shown["memory"]
    assert without["ram_draft_model"] == 0
    assert memory["ram_start"] - without["ram_start"] == memory["ram_draft_model"] > without["ram_weights"]
    each, before = (one["ram_kv"] / one["kv_tokens"] for one in (memory, without))
    assert each == 2 * before
    assert f"--speculative-model {TINY_MODEL}" in shown["command"]
    assert main(["plan", *flags, *drafting]) == 0
    assert "RAM, model that drafts" in capsys.readouterr().out


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
    assert "add --kv-disk, or leave --kv-disk-gib out" in fails(capsys, *without, "--kv-disk-gib", "2")
    assert "--prefix-cache off switches off" in fails(capsys, *flags, "--prefix-cache", "off")
    assert run(capsys, *flags, "--prefix-cache", "per-key")["tiers"]["disk"]["tokens"] == disk["tokens"]


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

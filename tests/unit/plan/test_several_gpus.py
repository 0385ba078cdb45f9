"""`moeserve plan --gpus 2`: shares that add up to the model, and speeds that follow from theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.config.units import GIB
from tests.conftest import TINY_MODEL
from tests.support.models.model_header import qwen3moe, write_header
from tests.support.router.plan_command import fails, run

pytestmark = pytest.mark.usefixtures("no_measuring")
TINY = ("--model", str(TINY_MODEL), "--gpu-memory", "4", "--ram", "4", "--gpus", "2")
EXPERTS, LAYERS = 8, 3


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-30B-A3B's shape: 17.3 GiB."""
    header = tmp_path_factory.mktemp("header") / "large.gguf"
    write_header(header, qwen3moe())
    return header


@pytest.mark.parametrize("parallel", ["tensor", "layers"])
def test_the_gpus_have_the_model_together(capsys: pytest.CaptureFixture[str], parallel: str) -> None:
    shown = run(capsys, *TINY, "--parallel", parallel)
    experts: dict[int, list[int]] = {layer: [] for layer in range(LAYERS)}
    for gpu in shown["gpus"]:
        for at, ids in enumerate(gpu["gpu_experts"]):
            experts[gpu["first_layer"] + at] += ids
    assert all(sorted(ids) == list(range(EXPERTS)) for ids in experts.values())
    assert shown["kv_tokens"] == min(gpu["kv_tokens"] for gpu in shown["gpus"])
    assert [gpu["layers"] for gpu in shown["gpus"]] == ([LAYERS] * 2 if parallel == "tensor" else [2, 1])
    assert f"--gpus 2 --parallel {parallel}" in shown["command"]


def test_experts_that_do_not_fit_are_in_ram(capsys: pytest.CaptureFixture[str], large: Path) -> None:
    flags = ("--model", str(large), "--gpus", "2", "--ram", "16", "--max-total-tokens", "4096")
    rates: dict[str, float] = {}
    for parallel in ("tensor", "layers"):
        all_there = run(capsys, *flags, "--gpu-memory", "24", "--parallel", parallel)
        assert [gpu["ram_weights"] for gpu in all_there["gpus"]] == [0, 0]
        small = run(capsys, *flags, "--gpu-memory", "8", "--parallel", parallel)
        assert all(gpu["ram_weights"] > GIB for gpu in small["gpus"])
        assert all(gpu["gpu_weights"] < 8 * GIB for gpu in small["gpus"])
        assert small["speed"]["decode"]["1"] < all_there["speed"]["decode"]["1"]
        rates[parallel] = all_there["speed"]["decode"]["1"]
    one = run(capsys, "--model", str(large), "--ram", "16", "--gpu-memory", "40")["speed"]["decode"]["1"]
    assert 0.9 * one < rates["layers"] <= one  # one GPU at a time


@pytest.mark.parametrize(("parallel", "gain"), [("tensor", 1.5), ("layers", 0.95)])
def test_a_prompt(capsys: pytest.CaptureFixture[str], large: Path, parallel: str, gain: float) -> None:
    """By layers the parts of a step of 4,096 are too small for unpacked weights, and lose what they win."""
    flags = ("--model", str(large), "--ram", "16", "--gpu-memory", "40")
    one = run(capsys, *flags)["speed"]["prefill"]["4096"]
    two = run(capsys, *flags, "--gpus", "2", "--parallel", parallel)["speed"]["prefill"]["4096"]
    assert gain * one < two < 2 * one


LARGER = {"hidden_size": 4096, "num_layers": 94, "num_heads": 64, "num_kv_heads": 4, "expert_width": 1536}


@pytest.mark.parametrize(
    ("shape", "measured"),
    [({}, {"1": 584, "64": 7598}), (LARGER, {"1": 192, "64": 1459})],
    ids=["30B", "235B"],
)
def test_what_two_h200s_reached(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shape: dict[str, int], measured: dict[str, float]
) -> None:
    """Tokens a second, docs/results/planner.md."""
    header = tmp_path / "header.gguf"
    write_header(header, qwen3moe(**shape))
    rates = ("--gpu-memory", "139", "--gpu-bandwidth", "4800", "--gpu-tflops", "790", "--ram", "16")
    planned = run(capsys, "--model", str(header), "--gpus", "2", *rates)["speed"]["decode"]
    assert {streams: planned[streams] for streams in measured} == pytest.approx(measured, rel=0.2)


def test_the_text_names_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from moeserve.cli.main import main

    assert main(["plan", *TINY, "--parallel", "layers"]) == 0
    text = capsys.readouterr().out
    assert "GPU 0: layers 0 to 1, all of its 16 experts" in text
    assert "GPU 1: layers 2 to 2, all of its 8 experts" in text


def test_what_cannot_be_planned(capsys: pytest.CaptureFixture[str], large: Path) -> None:
    assert "--n-gpu-layers" in fails(capsys, *TINY, "--n-gpu-layers", "1")
    assert "--kv-ram: is for a single GPU" in fails(capsys, *TINY, "--kv-ram", "1")
    assert "no effect with one GPU" in fails(capsys, *TINY[:-2], "--parallel", "layers")
    assert "more GPUs" in fails(
        capsys, "--model", str(large), "--gpus", "2", "--gpu-memory", "6", "--ram", "1"
    )
    assert "choose fewer GPUs" in fails(capsys, *TINY[:-1], "4", "--parallel", "layers")
    on_cpu = (*TINY[:2], *TINY[4:], "--device", "cpu")
    assert "--gpus: has no effect with --device cpu" in fails(capsys, *on_cpu)

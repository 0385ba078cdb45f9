"""`moeserve plan A B C`: which models fit beside each other."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from moeserve.cli.command_line import demonstration_model, resolve
from moeserve.cli.main import main
from moeserve.cli.plan.model_needs import POOL_SHARE, needs_of
from moeserve.cli.plan.several_models import ModelPlan, SeveralModelsPlan
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.processes.resident_memory import COMMON_BYTES
from tests.support.router.plan_command import fails, run


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{name}.gguf" for name in "abc"]
    for path in paths:
        shutil.copy(demonstration_model(), path)
    return [str(path) for path in paths]


def test_the_sets_that_fit_and_what_a_load_reads(
    models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run(capsys, *models, "--ram", "1.1", "--device", "cpu", "--disk-bandwidth", "0.5")
    assert shown["together"] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert shown["too_large"] == []
    for model in shown["models"]:
        assert model["read_seconds"] == model["weight_bytes"] / 0.5e9
        room = 1.1 * GIB - shown["common_ram_bytes"]
        assert 0.3 * GIB < model["ram_bytes"] < 0.3 * GIB + POOL_SHARE * room + (32 << 20)


def test_one_that_does_not_fit_alone_is_named(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *models, "--ram", "0.2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "Fit together in 0.20 GiB of RAM: none" in text
    assert text.count("Does not fit alone: ") == 3


def test_only_the_largest_sets_are_shown() -> None:
    sizes = {"a": 1, "b": 2, "c": 3, "d": 9}
    models = [ModelPlan(name, size, 0, 1, 1) for name, size in sizes.items()]
    plan = SeveralModelsPlan(models, 5 + COMMON_BYTES, 0, 1.0)
    assert plan.largest_sets == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [model.name for model in plan.too_large] == ["d"]
    on_gpu = [ModelPlan(name, 1, size, 1, 1) for name, size in sizes.items()]
    assert SeveralModelsPlan(on_gpu, 100 + COMMON_BYTES, 4, 1.0).largest_sets == [("a", "b"), ("a", "c")]


def test_models_are_named_before_the_flags(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "name several before the flags" in fails(capsys, *models[:2], "--model", models[2])
    assert "there is no" in fails(capsys, models[0], "/nowhere.gguf")


def test_models_on_several_gpus_take_some_of_each(
    models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--ram", "8", "--device", "cuda", "--gpus", "2", "--gpu-memory", "10")
    whole = run(capsys, *models, *flags)
    assert whole["together"] == [["a"], ["b"], ["c"]], "each takes both GPUs whole"
    budgeted = run(capsys, *models, *flags, "--gpu-memory-budget", "4")
    assert budgeted["together"] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert {model["gpu_bytes"] for model in budgeted["models"]} == {(4 << 30) + CUDA_CONTEXT_BYTES}
    one = run(capsys, models[0], models[1], *flags[:4], *flags[6:])
    assert 0 < one["models"][0]["gpu_bytes"] <= 10 * GIB


def test_a_model_whose_worker_is_elsewhere_needs_no_weights_here(models: list[str]) -> None:
    config = resolve(ServerConfig(model=models[0], device="cpu"))
    here = needs_of(config, 8 << 30, [])
    there = needs_of(dataclasses.replace(config, worker="gpu-host:9000"), 8 << 30, [80 << 30])
    assert there["gpus"] == []
    assert there["ram"] < here["ram"] - here["weights"]
    assert (there["weights"], there["overrides"]) == (0, {})

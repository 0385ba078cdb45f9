"""--device: what is chosen, and what a user is told who asks for a GPU that is not there."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from moeserve.cli.doctor import probes
from moeserve.errors import ConfigError
from moeserve.worker.loading.device import choose_device, gpu_obstacle, parse_gpus
from tests.conftest import TINY_MODEL
from tests.support.router.plan_command import fails


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_without_a_gpu() -> None:
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda: .*--device cpu"):
        choose_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_for_gpus_names_the_obstacle(capsys: pytest.CaptureFixture[str]) -> None:
    obstacle = gpu_obstacle()
    assert obstacle is not None
    said = fails(capsys, "--model", str(TINY_MODEL), "--gpus", "2")
    assert f"--gpus: {obstacle.text}; or give the memory of the planned GPUs: --gpu-memory" in said


@pytest.mark.parametrize(
    ("cuda", "available", "capability", "triton", "message"),
    [
        (None, False, (9, 0), True, "built without CUDA"),
        ("13.0", False, (9, 0), True, "no NVIDIA GPU here or its driver is older"),
        ("13.0", True, (7, 5), True, "compute capability 7.5, 8.0 or more"),
        ("13.0", True, (9, 0), False, "triton is missing"),
    ],
)
def test_obstacles_are_named(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    available: bool,
    capability: tuple[int, int],
    triton: bool,
    message: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if triton else None)
    with pytest.raises(ConfigError, match=message):
        choose_device("cuda")
    assert choose_device("auto") == "cpu"


def test_a_gpu_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert choose_device("auto") == choose_device("cuda") == "cuda"


@pytest.mark.parametrize(("text", "numbers"), [("1", [0]), ("3", [0, 1, 2]), ("2,0", [2, 0])])
def test_gpus_are_a_number_of_them_or_their_numbers(text: str, numbers: list[int]) -> None:
    assert parse_gpus(text) == numbers


@pytest.mark.parametrize("text", ["0", "-1", "two", "0,0", "1,", "1000", "²"])
def test_other_gpus_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)


def test_doctor_names_the_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "driver_version", lambda: "570.86")
    monkeypatch.setattr(torch.version, "cuda", None)
    driver, gpu = probes.gpu()
    assert driver.text == "NVIDIA 570.86"
    assert gpu.level == "warning"
    assert "this PyTorch was built without CUDA: install one with it" in gpu.text


def test_doctor_loads_the_extension() -> None:
    extension, cpu = probes.extension()
    assert extension.level == "ok"
    assert cpu.subject == "CPU"

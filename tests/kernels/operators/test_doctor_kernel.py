"""The kernel by which `moeserve doctor` sees whether Triton works."""

from __future__ import annotations

import pytest

from moeserve.cli.doctor import triton_kernel
from moeserve.cli.doctor.probes import check_triton
from tests.kernels.triton_device import DEVICE
from tests.support.worker.uninterpreted import run_uninterpreted


def test_a_kernel_runs() -> None:
    found = check_triton(DEVICE)
    assert (found.level, found.text) == ("ok", "compiles and runs kernels")


def test_a_compiler_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> bool:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.\n")

    monkeypatch.setattr(triton_kernel, "doubles", fails)
    found = check_triton(DEVICE)
    assert found.level == "error"
    assert "a kernel cannot be compiled: Please specify via CC environment variable." in found.text
    assert "gcc python3-dev" in found.remedy


def test_wrong_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "doubles", lambda device: False)
    assert check_triton(DEVICE).level == "error"


def test_the_kernel_compiles_for_a_gpu() -> None:
    """The interpreter takes what Triton's compiler refuses, annotations for example."""
    compiling = (
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource, compile\n"
        "from moeserve.cli.doctor.triton_kernel import _double\n"
        "kinds = {'x': '*fp32', 'out': '*fp32', 'COUNT': 'constexpr'}\n"
        "compile(ASTSource(_double, kinds, {'COUNT': 256}), target=GPUTarget('cuda', 90, 32))\n"
    )
    run_uninterpreted("-c", compiling)

"""Under qemu-user the AArch64 kernels give x86-64's bits: plain C++ those of plain C++, NEON those of AVX2.

The program `native/kernel_bits` is built twice, for this machine and by `cmake/aarch64-linux-gnu.cmake`, and prints a
checksum of what each kernel computes: packing and products of every type, norms, activations, attention, sampling.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from moeserve.quantization.table import QUANT_TYPES

ROOT = Path(__file__).resolve().parents[3]
SYSROOT = "/usr/aarch64-linux-gnu"
QEMU = ["qemu-aarch64", "-L", SYSROOT]
MISSING = [tool for tool in ("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64") if shutil.which(tool) is None]
REQUIRED = os.environ.get("MOESERVE_REQUIRE_AARCH64") == "1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),  # builds all kernels twice
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="compares with x86-64, which this machine is not"
    ),
    pytest.mark.skipif(
        bool(MISSING) and not REQUIRED, reason=f"needs {', '.join(MISSING)}: see docs/how-to/run-on-arm.md"
    ),
]


@functools.cache
def kernel_bits(machine: str) -> str:
    """Builds the program for "x86_64" or "aarch64" and returns its path."""
    build = ROOT / "build" / f"kernel-bits-{machine}"
    options = ["-DMOESERVE_EXTENSION=OFF", "-DMOESERVE_KERNEL_BITS=ON"]
    if machine == "aarch64":
        options.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}")
    subprocess.run(["cmake", "-S", ROOT, "-B", build, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", build, "-j2"], check=True, stdout=subprocess.DEVNULL)
    return str(build / "kernel_bits")


@functools.cache
def results(machine: str, isa: str) -> dict[str, str]:
    """The checksum of each result, by its name."""
    command = [*(QEMU if machine == "aarch64" else []), kernel_bits(machine), isa]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(line.split(" ", 1) for line in output.splitlines())


def different(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def test_the_program_covers_every_type_and_kernel() -> None:
    names = results("x86_64", "plain").keys()
    products = {name.split("/")[1] for name in names if name.startswith("product/")}
    assert len(products) == len(QUANT_TYPES)
    for kernel in ("pack/Q4_K", "rms_norm/768", "silu_mul/768", "attend_block/128", "attend_block_q8/128"):
        assert kernel in names
    assert {"sampled-tokens/32003", "delta_step-state", "pool-denormals"} <= names


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_results_are_finite_numbers_and_threads_flush_denormals(machine: str) -> None:
    found = results(machine, "plain")
    assert not [name for name, value in found.items() if "not-finite" in value or "differs" in value]
    assert found["pool-denormals"] == "zero"


def test_plain_kernels_give_the_same_bits() -> None:
    assert different(results("aarch64", "plain"), results("x86_64", "plain")) == []


@pytest.mark.parametrize("isa", ["neon_dotprod", "neon_i8mm"])
def test_neon_gives_the_bits_of_avx2(isa: str) -> None:
    if b"avx2" not in Path("/proc/cpuinfo").read_bytes():
        pytest.skip("this CPU has no AVX2, whose bits NEON gives")
    assert different(results("aarch64", isa), results("x86_64", "avx2")) == []


def test_a_fused_multiply_add_would_show() -> None:
    """The plain kernels round a product before they add it, so that the checksums of sums are others."""
    changed = different(results("aarch64", "neon_dotprod"), results("aarch64", "plain"))
    assert "product/Q4_K/1" in changed
    assert "attend_block/128" in changed


@pytest.mark.parametrize(
    ("cpu", "best"),
    [("cortex-a72", "plain"), ("neoverse-n1", "neon_dotprod"), ("max", "neon_i8mm")],
)
def test_the_instruction_set_is_chosen_by_what_the_cpu_has(cpu: str, best: str) -> None:
    """cortex-a72 has no dot products, neoverse-n1 no int8 matrix products, and QEMU's max all that QEMU knows."""
    run = subprocess.run(
        [*QEMU, "-cpu", cpu, kernel_bits("aarch64"), "none"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.rstrip().endswith(f"the best is {best}")


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64 of the package qemu-user")
@pytest.mark.parametrize(
    ("cpu", "best"), [("Nehalem", "plain"), ("SandyBridge", "plain"), ("Haswell", "avx2")]
)
def test_an_old_cpu_runs_no_instruction_that_it_lacks(cpu: str, best: str) -> None:
    """Nehalem has no AVX, SandyBridge no AVX2: tables of others' kernels may not even be looked at there."""
    command = ["qemu-x86_64", "-cpu", cpu, kernel_bits("x86_64"), "none"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stderr.rstrip().endswith(f"the best is {best}")

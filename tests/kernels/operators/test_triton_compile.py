"""Every kernel compiles for a Hopper GPU, which takes none: what the interpreter lets pass, the compiler may refuse.

A call of an operator on tensors without data (device "meta") compiles what it would launch.
"""

from __future__ import annotations

import pytest

from tests.support.measuring.gpu_operators.calls import CALLS
from tests.support.worker.uninterpreted import run_uninterpreted


@pytest.mark.slow  # 90 s of one core together
@pytest.mark.parametrize("name", CALLS)
def test_compiles(name: str) -> None:
    """Also with a barrier before the arguments of other warpgroups."""
    kernels = compile_calls(name)
    assert "_kernel" in kernels
    assert {line.split()[-1] for line in kernels.splitlines()} == {"0"}


# Operators of training, fp8, which is refused there, and what is for Hopper alone are for other GPUs.
NOT_ON_ALL = ("piecewise", "attention of fp8", "experts by integers")


@pytest.mark.slow  # three minutes of one core together
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(NOT_ON_ALL)])
def test_compiles_for_a_consumers_gpu(name: str) -> None:
    """Ada's: instructions and shared memory that it has; an A100 has more of both."""
    assert "_kernel" in compile_calls(name, capability=89)


@pytest.mark.slow
def test_attention_by_warpgroups_on_hopper_alone() -> None:
    shares, portable = "attention in equal shares", {"prefill_kernel", "decode_kernel"}
    assert attention_kernels(shares, 90) == {"warpgroup_prefill_kernel", "shared_decode_kernel"}
    assert attention_kernels(shares, 89) == portable
    assert attention_kernels("attention of q8_0 keys", 90) == portable


def attention_kernels(name: str, capability: int) -> set[str]:
    names = {line.split()[0] for line in compile_calls(name, capability).splitlines()}
    return {name for name in names if "prefill" in name or "decode" in name}


@pytest.mark.slow
def test_weights_in_pairs_compile_for_a_consumers_gpu() -> None:
    """The kernels that did not compile, among the slow ones."""
    assert "gated_sliced_k_gemm_kernel" in compile_calls("experts, 256", capability=89)


@pytest.mark.slow
def test_matrices_of_adapters_are_read_16_bytes_at_once() -> None:
    """In bfloat16, by the kernels of few rows, whose other operands are wider, but for shrink_kernel's int8."""
    lines = [line.split() for line in compile_calls("adapters, few rows").splitlines()]
    narrow = {
        name: int(loads) for name, _shared, loads, *_ in lines if name.startswith(("shrink_small", "expand"))
    }
    assert len(narrow) == 4
    assert not any(narrow.values()), narrow


@pytest.mark.slow
def test_q8_0_keys_and_values_become_float16_several_at_once() -> None:
    lines = [line.split() for line in compile_calls("attention of q8_0 keys").splitlines()]
    single = [int(line[3]) for line in lines if line[0] in ("decode_kernel", "prefill_kernel")]
    assert len(single) == 3
    # Each thread's codes of 64 keys and values are 128; what is left is the row's own token's.
    assert max(single) < 8, lines


@pytest.mark.slow
def test_scales_of_mxfp4_are_loaded_where_they_are_used() -> None:
    """Shared memory is only for sums over a program's columns; scales that go to other threads take 2 KB or more."""
    lines = [line.split() for line in compile_calls("experts, gpt-oss, few").splitlines()]
    shared = {line[0]: int(line[1]) for line in lines if line[0] in ("up_kernel", "down_kernel")}
    assert len(shared) == 2
    assert max(shared.values()) < 1024, shared


@pytest.mark.slow
def test_experts_weights_are_taken_apart_in_pairs() -> None:
    """With 65 rows and more, in bfloat16. test_triton_experts.py checks their values on a GPU."""
    lines = [line.split() for line in compile_calls("experts, 128 and 256, of k-quants").splitlines()]
    pairs = {line[0]: int(line[4]) for line in lines if "gemm" in line[0]}
    assert sorted(pairs) == ["gated_gemm_kernel", "gated_sliced_k_gemm_kernel", "gemm_kernel"]
    assert all(pairs.values()), lines


@pytest.mark.slow
def test_products_of_warpgroups_run_beside_the_next_weights() -> None:
    """One wait for all of them, behind the loop. A change that costs Triton its pipeline makes one a step."""
    lines = [line.split() for line in compile_calls("experts by quads").splitlines()]
    waits = {(line[0], line[1]): int(line[5]) for line in lines if "quad_gemm" in line[0]}
    assert len(waits) == 4
    assert set(waits.values()) == {1}, lines


def compile_calls(name: str, capability: int = 90) -> str:
    """What is printed: a line for each kernel that the calls of this name launch."""
    return run_uninterpreted("-m", "tests.support.measuring.compile_for_gpu", name, str(capability))

"""Every kernel compiles for a Hopper GPU, which takes none: what the interpreter lets pass, the compiler may refuse.

A call of an operator on tensors without data (device "meta") compiles what it would launch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hopper_operators import OPERATORS, SCRIPT

CALLS = {
    "linear, few": "linear(4, Q4, 512, 96, Q6, 32)",
    "linear, many": "linear(200, Q4, 512, 96, Q6, 32)",
    "linear, looked up": "linear(20, IQ4, 512, 96, None, 0)",
    "linear, floats": "linear(2, F32, 512, 96, None, 0), linear(20, F32, 512, 96, F32, 32)",
    "gated rows": "op.gated_rows(empty(4, 6000), empty(1, dtype=i32), GpuActivations(*both(4, 3000)))",
    "linear, exact": "exact(600)",
    "experts, one": "experts(1, Q4, Q6)",
    "experts, two": "experts(2, Q4, Q6)",
    "experts, few": "experts(16, Q4, Q6)",
    "experts, some": "experts(30, Q4, Q6)",
    "experts, 128 and 256": "experts(128, Q4, Q6), experts(256, Q4, Q3_K)",
    "experts by quads": "quads(256, Q4, Q6), quads(2048, Q6, Q4)",
    "experts, many": "experts(2000, Q4, Q6)",
    "experts and linear, unpacked": "large_batch(4096, Q4, Q6), large_batch(4096, BF16, BF16)",
    "rows": "rows(3, Q4)",
    "norms behind blocks": "sandwiched(3), experts(2, Q4, Q6, activation='gelu')",
    "rows, looked up": "rows(3, IQ4)",
    "attention": "attention(3)",
    "linear, bias": "linear(4, Q4, 512, 96, Q6, 32, bias=True), linear(20, Q4, 512, 96, Q6, 32, bias=True)",
    "linear, bias, many": "linear(200, Q4, 512, 96, Q6, 32, bias=True), linear(2, F32, 512, 96, F32, 32, bias=True)",
    "experts, gpt-oss, few": "experts(2, MXFP4, MXFP4, oai=True)",
    "experts, gpt-oss, some": "experts(30, MXFP4, MXFP4, oai=True)",
    "experts, gpt-oss, many": "experts(2000, MXFP4, MXFP4, oai=True)",
    "experts, shared": "experts(2, Q4, Q6, experts=1, top_k=1), experts(30, Q4, Q6, experts=1, top_k=1)",
    "rows of other families": "rows_of_others(3)",
    "attention of other families": "attention_of_others(3)",
    "delta net, few": "delta_net(3, f32, False)",
    "delta net, many": "delta_net(200, torch.bfloat16, True)",
    "delta net, many, floats": "delta_net(200, f32, True)",
    "attention of q8_0 keys": "attention_of_q8_0(3)",
    "attention of fp8 keys": "attention_of_fp8(3)",
    "attention of wide heads": "wide_attention(3)",
    "latent attention, few": "latent_attention(3, f32)",
    "latent attention, many": "latent_attention(200, torch.bfloat16)",
    "sampling": "sampling(2)",
    "pointwise": "pointwise_kernels()",
    "piecewise attention": "piecewise(torch.bfloat16, 128)",
    "piecewise attention, wide": "piecewise(torch.float16, 256)",
    "piecewise attention, floats": "piecewise(f32, 80)",
    "sums over GPUs": "over_gpus(f32), over_gpus(torch.bfloat16)",
    "adapters, few rows": "adapters(8, f32)",
    "adapters, many rows": "adapters(2000, torch.bfloat16)",
    "pages": "pages(1024), pages(6)",
    "promotions": "promotions(), hand_off(4)",
    "panels": "panels(Q4, Q6, IQ4, Q3_K, Q5_K, Q8_0)",
}


@pytest.mark.slow  # 90 s of one core together
@pytest.mark.parametrize("name", CALLS)
def test_compiles(name: str) -> None:
    assert "_kernel" in compile_calls(CALLS[name])


# Operators of training, and fp8, which is refused there, are for other GPUs.
NOT_ON_ALL = ("piecewise", "attention of fp8")


@pytest.mark.slow  # three minutes of one core together
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(NOT_ON_ALL)])
def test_compiles_for_a_consumers_gpu(name: str) -> None:
    """Ada's: instructions and shared memory that it has; an A100 has more of both."""
    assert "_kernel" in compile_calls(CALLS[name], capability=89)


def test_weights_in_pairs_compile_for_a_consumers_gpu() -> None:
    """Of what is slow, kernels that did not."""
    assert "gated_sliced_k_gemm_kernel" in compile_calls("experts(256, Q4, Q6)", capability=89)


@pytest.mark.slow
def test_matrices_of_adapters_are_read_16_bytes_at_once() -> None:
    """In bfloat16, by the kernels of few rows, whose other operands are wider, but for shrink_kernel's int8."""
    lines = [line.split() for line in compile_calls(CALLS["adapters, few rows"]).splitlines()]
    narrow = {
        name: int(loads) for name, _shared, loads, *_ in lines if name.startswith(("shrink_small", "expand"))
    }
    assert len(narrow) == 4
    assert not any(narrow.values()), narrow


@pytest.mark.slow
def test_q8_0_keys_and_values_become_float16_several_at_once() -> None:
    lines = [line.split() for line in compile_calls(CALLS["attention of q8_0 keys"]).splitlines()]
    single = [int(line[3]) for line in lines if line[0] in ("decode_kernel", "prefill_kernel")]
    assert len(single) == 3
    # Each thread's codes of 64 keys and values are 128; what is left is the row's own token's.
    assert max(single) < 8, lines


@pytest.mark.slow
def test_experts_weights_are_taken_apart_in_pairs() -> None:
    """Of 65 rows and more, in bfloat16. What they are then, test_triton_experts.py says on a GPU."""
    calls = "experts(128, Q4, Q6), experts(256, Q4, Q6)"
    lines = [line.split() for line in compile_calls(calls).splitlines()]
    pairs = {line[0]: int(line[4]) for line in lines if "gemm" in line[0]}
    assert sorted(pairs) == ["gated_gemm_kernel", "gated_sliced_k_gemm_kernel", "gemm_kernel"]
    assert all(pairs.values()), lines


@pytest.mark.slow
def test_products_of_warpgroups_run_beside_the_next_weights() -> None:
    """One wait for all of them, behind the loop. A change that costs Triton its pipeline makes one a step."""
    lines = [line.split() for line in compile_calls(CALLS["experts by quads"]).splitlines()]
    waits = {(line[0], line[1]): int(line[5]) for line in lines if "quad_gemm" in line[0]}
    assert len(waits) == 4
    assert set(waits.values()) == {1}, lines


def compile_calls(calls: str, capability: int = 90) -> str:
    """What is printed: a line for each kernel."""
    # A process of its own: the others in this one are interpreted.
    source = f"{SCRIPT}{OPERATORS}"
    done = subprocess.run(
        [sys.executable, "-c", source, calls, str(capability)],
        cwd=Path(__file__).resolve().parents[2],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

"""A program that compiles for a GPU, which it does not need, what calls of operators would launch. It prints a line for
each kernel: its name, its bytes of shared memory, and counts of instructions.

    python -m tests.support.measuring.compile_for_gpu NAME CAPABILITY

NAME: of gpu_operators/calls.py. CAPABILITY: the GPU's compute capability, 90 for Hopper.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource

from moeserve.kernels import launch

TYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
NUMBERS: dict[type, str] = {int: "i32"}  # where a kernel does not say
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 120: 101_376}  # bytes that a program may have


def compile_launches(capability: int) -> None:
    """From here on a launch compiles the kernel for GPUs of this compute capability, and no more. Before operators are
    imported: some of their modules take shared_memory() by its name."""
    target, shared = GPUTarget("cuda", capability, 32), SHARED[capability]

    def compile_kernel(
        kernel: launch.Kernel,
        kind: tuple[object, ...],
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        options: dict[str, Any],
    ) -> None:
        source = source_of(kernel, arguments)
        for stages in range(options.get("num_stages", launch.DEFAULT_STAGES), 0, -1):  # as with_fewer_stages
            compiled = compile_source(source, target=target, options=options | {"num_stages": stages})
            if compiled.metadata.shared <= shared:
                break
        describe(kernel.function.__name__, compiled)
        assert compiled.metadata.shared <= shared, "more shared memory than a block has"

    launch.shared_memory = lambda: shared  # type: ignore[assignment]
    launch.PDL = capability >= 90
    launch.WARPGROUPS = capability == 90
    launch.Kernel.launch = compile_kernel  # type: ignore[method-assign, assignment]
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))


def source_of(kernel: launch.Kernel, arguments: tuple[Any, ...]) -> ASTSource:
    """Triton's form of a kernel and the kinds of its arguments; tensors start at multiples of 16 bytes."""
    signature: dict[str, str] = {}
    constants, aligned = {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.function.params, arguments, strict=True)):
        name = parameter.name
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):  # a TMA descriptor
            boxes = f"{TYPES[value.base.dtype]}{value.block_shape}"
            signature[name] = f"tensordesc<{boxes},{value.layout!r}>"
        elif value is not None and not parameter.is_constexpr:
            # The pointwise kernels' numbers, sizes and strides.
            signature[name] = parameter.annotation_type or NUMBERS[type(value)]
        else:
            signature[name], constants[name] = "constexpr", value
    kind = GluonASTSource if kernel.function.is_gluon() else ASTSource
    return kind(kernel.function, signature, constants, aligned)


def describe(name: str, compiled: Any) -> None:
    """Prints the kernel's line, of which tests read the columns."""
    ptx = compiled.asm["ptx"]
    narrow = ptx.count("ld.global.b16")  # reads of 2 bytes
    single = ptx.count("cvt.rn.f16.s")  # conversions of one integer to float16
    pairs = ptx.count("fma.rn.bf16x2") + ptx.count("mul.rn.bf16x2")
    waits = ptx.count("wgmma.wait_group.sync.aligned 0")  # for all products under way
    print(name, compiled.metadata.shared, narrow, single, pairs, waits, unguarded_arguments(ptx), flush=True)


def unguarded_arguments(ptx: str) -> int:
    """Returns 1 if a kernel writes the arguments of its other warpgroups to shared memory that a slower warp may still
    read a reduction's result from: Triton 3.6 puts no barrier between the two."""
    before, *started = ptx.split("barrier.sync", 1)
    if not started:
        return 0  # no other warpgroups
    last_read = max(before.rfind("ld.shared"), before.rfind("ldmatrix"))
    return int(last_read > before.rfind("bar.sync"))


def main(name: str, capability: int) -> None:
    compile_launches(capability)  # before what follows is imported
    from tests.support.measuring.gpu_operators.calls import CALLS, FEWER

    for call in (CALLS | FEWER)[name]:
        call()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""What a launch costs the host: Triton's own way, through moeserve.kernels.launch, and through torch.ops."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moeserve.kernels.launch import pdl
from moeserve.kernels.norm.op import add_norm
from moeserve.kernels.norm.triton import add_norm_kernel


def microseconds(call: Callable[[], object], count: int = 2000) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / count * 1e6


def measure_launches() -> None:
    x, weight, y = (torch.randn(shape, device="cuda") for shape in ((1, 2048), (2048,), (1, 2048)))
    count = torch.ones(1, dtype=torch.int32, device="cuda")
    none = (None, None, None, None, None)
    constants = (2048, 0, 1e-6, 2048, pdl())
    arguments = (x, *none, count, weight, y, None, None, *constants)
    options = {"num_warps": 8, "launch_pdl": pdl()}
    ways = {
        "Triton's kernel[grid](...)": lambda: add_norm_kernel.function[(1,)](*arguments, **options),
        "cached launch": lambda: add_norm_kernel((1,), *arguments, **options),
        "cached launch in its operator's function": lambda: add_norm(
            x, *none, count, weight, 1e-6, y, None, None
        ),
    }
    if hasattr(torch.ops, "moeserve") and hasattr(torch.ops.moeserve, "add_norm"):
        ways["torch.ops.moeserve.add_norm"] = lambda: torch.ops.moeserve.add_norm(
            x, *none, count, weight, 1e-6, y, None, None
        )
    ways["torch's x.add_(y)"] = lambda: x.add_(y)
    for name, call in ways.items():
        print(f"launch: {name:<44} {microseconds(call):6.2f} us", flush=True)

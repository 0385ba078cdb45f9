"""The operator library beside torch and, where it is installed, FlagGems (PyPI: flag-gems), on one GPU.

    python -m benchmarks.gpu.operators

Pointwise operations of 1 MB and more, times in CUDA graphs; what a call costs the host; piecewise attention beside our
own attention and torch's. 40 seconds, most of them compilation.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.launch_cost import microseconds
from benchmarks.gpu.prefill import batch_of
from benchmarks.gpu.shape import SHAPE, seconds
from moeserve.kernels.attention.op import prefill_attention
from moeserve.kernels.delta_net.op import sigmoid_gate
from moeserve.kernels.operators.piecewise import op as piecewise
from moeserve.kernels.operators.pointwise import library, pointwise

MB = 1 << 20
SIZES = (1, 4, 32, 256)  # MB of the result
TOKENS = (2048, 8192)

Call = Callable[[], object]


@pointwise
def add(x: Any, y: Any) -> Any:
    return x + y


@pointwise
def multiply_add(x: Any, y: Any, z: Any) -> Any:
    return x + y * z


def flag_gems() -> Any:
    """The package, or None."""
    return None if importlib.util.find_spec("flag_gems") is None else importlib.import_module("flag_gems")


def pointwise_cases(
    megabytes: int, dtype: torch.dtype, gems: Any
) -> dict[str, tuple[Call, Call, Call | None]]:
    """(ours, torch's, FlagGems') by name; matrices of rows of 2,048."""
    rows = megabytes * MB // dtype.itemsize // 2048
    x, y = (torch.randn(rows, 2048, device="cuda").to(dtype) for _ in range(2))
    out, row, column = torch.empty_like(x), y[0].clone(), y[:, :1].clone()
    turned = torch.randn(2048, rows, device="cuda").to(dtype).T
    other = torch.randn(rows, 2048, device="cuda").to(
        torch.bfloat16 if dtype == torch.float32 else torch.float32
    )
    wide = torch.randn(rows, 4096, device="cuda").to(dtype)[:, 1024:3072]
    return {
        "x + y": (
            lambda: add(x, y, out=out), lambda: torch.add(x, y, out=out), gems and (lambda: gems.add(x, y))
        ),
        "x + row": (
            lambda: add(x, row, out=out), lambda: torch.add(x, row, out=out), gems and (lambda: gems.add(x, row))
        ),
        "x + column": (lambda: add(x, column), lambda: torch.add(x, column), None),
        "x + transposed": (lambda: add(x, turned), lambda: torch.add(x, turned), None),
        "x + slice": (lambda: add(x, wide), lambda: torch.add(x, wide), None),
        "x + y of another type": (lambda: add(x, other), lambda: torch.add(x, other), None),
        "x + row * y": (lambda: multiply_add(x, row, y), lambda: torch.addcmul(x, row, y), None),
        "silu(x) * y": (
            lambda: library.silu_mul(x, y), lambda: F.silu(x) * y, gems and (lambda: gems.silu_and_mul(x, y))
        ),
    }  # fmt: skip


def measure_pointwise(gems: Any) -> None:
    print(f"{'pointwise':<44} {'us':>8} {'torch':>8} {'gems':>8}  torch / ours", flush=True)
    for megabytes in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for name, calls in pointwise_cases(megabytes, dtype, gems).items():
                times = [seconds(lambda _, c=c: c(), 10) * 1e6 if c else float("nan") for c in calls]  # type: ignore[misc]
                label = f"{name}, {str(dtype).removeprefix('torch.')}, {megabytes} MB"
                print(
                    f"{label:<44} {times[0]:8.1f} {times[1]:8.1f} {times[2]:8.1f}  {times[1] / times[0]:.2f}",
                    flush=True,
                )


def measure_host(gems: Any) -> None:
    x, y, out = (torch.randn(64, 64, device="cuda") for _ in range(3))
    calls: dict[str, Call] = {
        "ours, x + y": lambda: add(x, y),
        "ours, x + y, out=": lambda: add(x, y, out=out),
        "ours, x + number": lambda: add(x, 2.0),
        "torch, x + y": lambda: torch.add(x, y),
        "torch, x + y, out=": lambda: torch.add(x, y, out=out),
        "torch, x + number": lambda: torch.add(x, 2.0),
        "ours, silu(x) * y": lambda: library.silu_mul(x, y),
        "torch, silu(x) * y": lambda: F.silu(x) * y,
    }
    if gems is not None:
        calls["FlagGems, x + y"] = lambda: gems.add(x, y)
    for name, call in calls.items():
        print(f"host: {name:<38} {microseconds(call):8.2f} us a call", flush=True)


def measure_gate(rows: int) -> None:
    """Attention's gate, without int8: the hand-written kernel, which is for int8 and other types, beside the generated
    one that the engine launches."""
    s = SHAPE
    width = s.heads * s.dim
    x, both = (
        torch.randn(rows, width, device="cuda").bfloat16(),
        torch.randn(rows, 2 * width, device="cuda").bfloat16(),
    )
    gate, count = both[:, width:], torch.tensor([rows], dtype=torch.int32, device="cuda")
    wide = gate.float()
    hand = seconds(lambda _: sigmoid_gate(x, wide, s.dim, count, None, None), 10)
    generated = seconds(lambda _: sigmoid_gate(x, gate, s.dim, count, None, None), 10)
    print(f"gate of {rows} rows: by hand {hand * 1e6:.1f} us, generated {generated * 1e6:.1f}", flush=True)


def attention_inputs(n: int, dtype: torch.dtype) -> list[Tensor]:
    s = SHAPE
    return [
        torch.randn(1, heads, n, s.dim, device="cuda").to(dtype)
        for heads in (s.heads, s.kv_heads) * 2 + (s.kv_heads,)
    ]


def measure_piecewise(n: int) -> None:
    s = SHAPE
    batch = batch_of(n)
    assert batch.tiles is not None
    tiles = batch.tiles
    keys, values = (torch.randn(n, s.kv_heads, s.dim, device="cuda").half() for _ in range(2))
    q, out = (
        torch.randn(n, s.heads, s.dim, device="cuda").half() / 11,
        torch.empty(n, s.heads * s.dim, device="cuda").half(),
    )
    flops = 2.0 * n * n * s.heads * s.dim
    ours = seconds(lambda _: prefill_attention(q, keys, values, batch.table, tiles, out), 3)
    q1, k1, q2, k2, v = inputs = attention_inputs(n, torch.float16)
    torchs = seconds(lambda _: F.scaled_dot_product_attention(q1, k1, v, is_causal=True, enable_gqa=True), 3)
    print(
        f"attention of {n}: ours {flops / ours / 1e12:.0f} TFLOP/s, torch's {flops / torchs / 1e12:.0f}",
        flush=True,
    )
    for distance in (n // 8, n // 2, n):
        time = seconds(lambda _: piecewise.forward(q1, k1, q2, k2, v, distance, True), 3)  # noqa: B023
        result, lse = piecewise.forward(q1, k1, q2, k2, v, distance, True)
        back = seconds(lambda _: piecewise.backward(tuple(inputs), result, lse, result, distance, True), 2)  # noqa: B023
        print(
            f"piecewise of {n}, distance {distance}: {flops / time / 1e12:.0f} TFLOP/s, {ours / time:.2f} of our "
            f"attention's rate; gradients {2.5 * flops / back / 1e12:.0f} TFLOP/s",
            flush=True,
        )


def main() -> None:
    gems = flag_gems()
    print(
        torch.cuda.get_device_name(),
        "torch",
        torch.__version__,
        "FlagGems",
        gems and gems.__version__,
        flush=True,
    )
    with torch.no_grad():
        measure_host(gems)
        for rows in TOKENS:
            measure_gate(rows)
        for n in TOKENS:
            measure_piecewise(n)
        measure_pointwise(gems)


if __name__ == "__main__":
    main()

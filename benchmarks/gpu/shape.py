"""The shape of Qwen3-30B-A3B, weights of that shape with random bits, and timing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.planes import Planes, empty_planes
from moeserve.quantization import QuantType, Scale

BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12


@dataclass(frozen=True)
class Shape:
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    dim: int = 128
    experts: int = 128
    top_k: int = 8
    ff: int = 768
    vocab: int = 151_936
    layers: int = 48
    eps: float = 1e-6


SHAPE = Shape()


def random_planes(kind: QuantType, *shape: int, device: str = "cuda", seed: int | None = None) -> Planes:
    """Random codes with scales that make weights of about 0.02."""
    p = empty_planes(kind, shape, device)
    g = torch.Generator(device).manual_seed(hash((int(kind), *shape)) % 2**31 if seed is None else seed)
    f = kind.layout
    if f is None:
        p.codes.copy_(
            torch.randn(p.codes.shape, device=device, generator=g, dtype=torch.float32).to(p.codes.dtype)
            * 0.02
        )
        return p
    p.codes.random_(generator=g)
    octets = p.scales.view(torch.uint8)
    if f.scale in (Scale.F16, Scale.F16_MIN):
        halves = p.scales.view(torch.float16)
        halves.copy_(
            torch.rand(halves.shape, device=device, generator=g) * 0.02 * 2 ** (1 - f.low_bits - f.high_bits)
        )
    elif f.scale == Scale.E8M0:
        octets.random_(118, 121, generator=g)
    else:
        octets.random_(0, 64, generator=g)
        pair = torch.tensor(
            [1e-4 * 2 ** (3 - f.low_bits - f.high_bits), 1e-4], dtype=torch.float16, device=device
        )
        p.supers.copy_(pair.view(torch.int32).expand_as(p.supers))
    return p


def tensors(p: Planes) -> list[Tensor]:
    return [p.codes, p.scales, p.supers]


def seconds(launches: Callable[[int], object], count: int, *, graph: bool = True, repeats: int = 5) -> float:
    """Median seconds of one of `count` launches: launches(i) for i in 0 .. count - 1, in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches(0)  # compiles
        stream.synchronize()
        captured = None
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                for i in range(count):
                    launches(i)
            captured.replay()
        times: list[float] = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            if captured is not None:
                captured.replay()
            else:
                for i in range(count):
                    launches(i)
            end.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(end) / 1000 / count)
    return statistics.median(times)


def report(name: str, time: float, bytes: float, flops: float = 0.0) -> None:
    floor = max(bytes / BYTES_PER_S, flops / FLOPS_PER_S)
    bound = "memory" if bytes / BYTES_PER_S >= flops / FLOPS_PER_S else "compute"
    print(
        f"{name:<44} {time * 1e6:9.1f} us  {bytes / time / 1e9:7.0f} GB/s  {flops / time / 1e12:6.1f} TFLOP/s  "
        f"{floor / time:5.1%} of the {bound} floor",
        flush=True,
    )

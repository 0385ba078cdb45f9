"""The fitted constants of a GPU's speed, beside its measured rates. Only `HybridSpeed` uses them.

`python -m benchmarks.plan_accuracy … --save runs.jsonl` measures, and the same program with `--fit runs.jsonl` finds
the constants that fit; they are copied here by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuConstants:
    """Times, and shares of a rate in `GpuRates` or `CpuRates` that the engine reaches.

    They were fitted to Qwen3-30B-A3B's shape in Q4_K_M on an H200. The share of PCIe lies between those of two hosts of
    the same kind; the shares of the hand-off and of RAM are the pool's own times (docs/results/planner.md, "The pool's
    share").
    """

    layer_s: float = 21e-6  # a layer's kernels, one after another
    step_s: float = 65e-6  # a step beside its layers: the host, the choice of tokens
    dense_read: float = 1.0  # few rows: dense weights, the head and KV
    route_read: float = 0.8  # few rows: experts, once for each route
    many_read: float = 0.49  # many rows: weights, each once, on their way to the tensor cores
    ops: float = 0.202  # many rows
    # Thousands of rows, of which weights are unpacked to floats before the products: a layer's unpacking, products,
    # attention and what is neither, from docs/results/gpu-kernels.md.
    unpack_read: float = 0.19
    unpacked_ops: float = 0.65
    attention_ops: float = 0.5
    row_s: float = 0.14e-6  # of each row in each layer: norms, rotation, routing, sorting
    handoff_s: float = 19e-6  # to the CPU pool and back, in each layer that has experts in RAM
    idle_handoff_s: float = 3e-6  # the same where the pool has nothing to compute
    # What fetches cost a layer beside their copies, if it delays both GPU and pool: the choice takes 8 to 13 us, and
    # unpacking 2 to 5, twice, which the pool's reads may hide (docs/results/experts-in-ram.md). With it
    # plans have 0.87 to 1.06 of the measured speed (docs/results/planner.md).
    fetch_s: float = 12e-6
    ram_read: float = 0.86  # experts in RAM
    pcie: float = (
        0.83  # streamed experts: the first layer's have nothing to hide behind, the CPU reads RAM too
    )
    unpack: float = 0.39  # of the GPU's reading: what is streamed becomes planes there


H200 = GpuConstants()

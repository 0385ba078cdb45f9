"""The rates of a machine that a plan uses."""

from __future__ import annotations

from dataclasses import dataclass

OPS_A_LAYER = 9  # operations that the CPU engine queues per layer


@dataclass(frozen=True, slots=True)
class CpuRates:
    """The rates of all threads together."""

    read: float  # bytes per second of reading weights, with nothing else to do
    dense_ops: float  # multiplications and additions per second in products of a matrix with many tokens
    expert_ops: float  # the same for routed experts
    op_s: float  # seconds of an operation with next to nothing to do
    step_s: float = 0.0  # seconds of a step beside its operations
    row_s: float = 0.0  # seconds per sampled row, with a tiny vocabulary
    cache_bytes: int = 0  # last-level cache: a model that fits into it is not read from RAM


@dataclass(frozen=True, slots=True)
class GpuRates:
    """The rates that a plan assumes for a GPU. The defaults are those of a medium GPU; state your own."""

    read: float = 900e9  # bytes a second
    ops: float = 150e12  # bf16
    pcie: float = 25e9  # bytes a second, from RAM

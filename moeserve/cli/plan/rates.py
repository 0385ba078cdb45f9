"""The rates of a machine that a plan computes with."""

from __future__ import annotations

from dataclasses import dataclass

OPS_A_LAYER = 9  # operations that the CPU engine queues for a layer


@dataclass(frozen=True, slots=True)
class CpuRates:
    """The rates of all threads together."""

    read: float  # bytes a second, of weights that are read and nothing else
    dense_ops: float  # multiplications and additions a second, of a matrix with many tokens
    expert_ops: float  # the same of routed experts
    op_s: float  # of an operation that has next to nothing to do
    step_s: float = 0.0  # what a step takes beside its operations
    row_s: float = 0.0  # and each row that samples, without a vocabulary to speak of
    cache_bytes: int = 0  # of the last level: a model that fits in there is not read from RAM


@dataclass(frozen=True, slots=True)
class GpuRates:
    """The rates that a plan assumes of a GPU. The defaults are a middling GPU's; give yours."""

    read: float = 900e9  # bytes a second
    ops: float = 150e12  # bf16
    pcie: float = 25e9  # bytes a second, from RAM

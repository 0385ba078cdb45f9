"""Computes x += output(norm((mamba2(conv(x, B, C), dt) + D x) * silu(z))) with z, x, B, C, dt of norm(x), queued on
the pool's stream."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.stream_operands import StateLayer
from moeserve.models.blocks.cpu.residual import add_product, read_residual
from moeserve.models.blocks.cpu.workspace import CpuBatch, CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuMamba2
from moeserve.models.mamba2 import Mamba2Shape


def project_mamba2(stream: CpuStream, w: CpuMamba2, eps: float, n: int, space: CpuWorkspace) -> None:
    """Launches the product of norm(x). eps: added to the mean square under the norm's root; n: rows of the step."""
    read_residual(stream, w.norm, eps, n, space)
    multiply_mamba2(stream, w, n, space)


def multiply_mamba2(stream: CpuStream, w: CpuMamba2, n: int, space: CpuWorkspace) -> None:
    """Launches the product of y, the norm of x. n: rows of the step."""
    assert space.mamba2 is not None
    stream.linear(space.y, n, w.input, [space.mamba2.projected])


def recur_mamba2(
    stream: CpuStream,
    w: CpuMamba2,
    shape: Mamba2Shape,
    state: StateLayer,
    batch: CpuBatch,
    space: CpuWorkspace,
    pending: Tensor | None = None,
) -> None:
    """Launches the rest of a Mamba-2 block after `project_mamba2`: convolution, recurrence, norm and output projection,
    whose result goes where `block_output` says. Advances `state`. pending: this layer's draft record, if rows may have
    drafts, else None."""
    n, own = batch.n, space.mamba2
    assert own is not None
    assert batch.states is not None
    heads = shape.heads
    stream.mamba2(
        own.projected, own.decays, w.parameters, shape.eps, heads, state, batch.states, n, own.out, pending
    )
    add_product(stream, own.out, n, w.output, space)

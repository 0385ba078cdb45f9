"""Executes pointwise expressions: by a generated Triton kernel on a GPU, by torch on a CPU.

@pointwise
def silu_mul(gate, up):
    return silu(gate) * up

y = silu_mul(gate, up)          # shapes broadcast and types promote as torch's
silu_mul(gate, up, out=y)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels.operators.pointwise.expression import Expression, trace
from moeserve.kernels.operators.pointwise.layout import result_strides
from moeserve.kernels.operators.pointwise.plan import Argument, Plan, checked, plan_of
from moeserve.kernels.operators.pointwise.reference import evaluate
from moeserve.kernels.operators.pointwise.source import KernelKind, kernel_source

WARPS = 4
MAX_PLANS = 4096  # kinds of calls that are cached


class Pointwise:
    """A pointwise operation on tensors of one device, and numbers. Another number needs no new compilation.

    The result has the broadcast shape and torch's promoted dtype. It has the strides of the tensors of that shape
    if these agree and have no gaps, else contiguous ones. Halves are computed in float32 and rounded once. On a
    GPU, division, square roots and exponentials err by up to 2 ulp. There is no gradient.

    Raises TypeError for dtypes that an operation does not accept or `out` cannot hold, and for a wrong number of
    arguments; ValueError for shapes that do not match or tensors of several devices; RuntimeError for a tensor that
    requires a gradient.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.expression: Expression = trace(function)
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self._plans: dict[tuple[object, ...], tuple[Plan, Any, tuple[object, ...]]] = {}
        self._kernels: dict[KernelKind, Any] = {}

    def __call__(self, *arguments: Argument, out: Tensor | None = None) -> Tensor:
        """out: of the result's shape, any strides; either an argument itself, or memory that no argument shares."""
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.is_cuda:
                return self.launch(*arguments, out=out)
        return self.reference(*arguments, out=out)

    def reference(self, *arguments: Argument, out: Tensor | None = None) -> Tensor:
        """Returns the expression's value, computed with torch's operations on any device. out: tensor to write the
        value to; None: a new one, with the dtype and broadcast shape that torch would give it. Raises TypeError and
        ValueError as the class says."""
        steps, _ = checked(self.expression, arguments, out)
        return (self.empty_result(*arguments) if out is None else out).copy_(evaluate(steps, arguments))

    def launch(self, *arguments: Argument, out: Tensor | None = None) -> Tensor:
        """Launches the generated kernel and returns its result; arguments and `out` as in `reference`. Tensors must be
        on the current CUDA device; under Triton's interpreter, on any device. Raises TypeError and ValueError as the
        class says."""
        key = (
            torch.is_grad_enabled(),
            *[
                (a.dtype, a.shape, a.stride(), a.data_ptr() % 16, a.device, a.requires_grad)
                if isinstance(a, Tensor)
                else type(a)
                for a in (arguments if out is None else (*arguments, out))
            ],
        )
        known = self._plans.get(key)
        if known is None:
            known = self._note(key, plan_of(self.expression, arguments, out), out, arguments)
        plan, kernel, compiled_key = known
        if out is None:
            out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device=plan.device)
        if plan.has_bools:
            arguments = tuple(int(a) if isinstance(a, bool) else a for a in arguments)
        if plan.grid[0]:
            kernel.launch(compiled_key, plan.grid, (out, *arguments, *plan.rest), {"num_warps": WARPS})
        return out

    def empty_result(self, *arguments: Argument) -> Tensor:
        """Returns an uninitialised tensor with the shape and dtype of the call's result. The arguments need no data."""
        steps, shape = checked(self.expression, arguments, None)
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        return tensors[0].new_empty_strided(shape, result_strides(shape, tensors), dtype=steps[-1].kind.dtype)

    def source(self, *arguments: Argument, out: Tensor | None = None) -> str:
        """Returns the Python source of the Triton kernel that `launch` with these arguments runs."""
        return self._source(plan_of(self.expression, arguments, out).kind)

    def _note(
        self, key: tuple[object, ...], plan: Plan, out: Tensor | None, arguments: tuple[Argument, ...]
    ) -> tuple[Plan, Any, tuple[object, ...]]:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        if out is None:  # torch allocates with this alignment
            out = torch.empty(0, dtype=plan.dtype, device=plan.device)
        self._plans[key] = known = plan, self._kernel(plan.kind), plan.compiled_key(out, arguments)
        return known

    def _kernel(self, kind: KernelKind) -> Any:
        # Imported late: on a CPU Triton is not needed.
        from moeserve.kernels.operators.pointwise.generated import kernel_of

        if kind not in self._kernels:
            self._kernels[kind] = kernel_of(f"{self.expression.name}_kernel", self._source(kind), kind)
        return self._kernels[kind]

    def _source(self, kind: KernelKind) -> str:
        return kernel_source(f"{self.expression.name}_kernel", self.expression, kind)


def pointwise(function: Callable[..., Any]) -> Pointwise:
    """Decorator: makes the pointwise operation that `function` computes on expressions' values."""
    return Pointwise(function)

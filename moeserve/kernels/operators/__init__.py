"""The kernels as PyTorch operators: one name, C++ on CPU tensors, Triton on CUDA ones.

    from moeserve.kernels import operators
    w = operators.weight(rows, kind, (out, cols), "cuda")      # GGUF bytes, once
    y = torch.ops.moeserve.linear(x, w, kind)                  # x float32 [n, cols] on w's device

A call allocates its result and is complete in itself: the way in for other programs, which find every kernel under one
name whatever the device. Importing this imports nothing of the server, and the server imports nothing of this package,
nor of its parts: `pointwise`, which makes kernels from expressions, and `piecewise`, an attention with two embeddings.
The engines and the kernels' own tests call what is below: `cpu_stream.py`, and the `op.py` of each operator's folder.
That layer writes into given memory, waits for nothing and has options that these names leave out (windows, biases,
other routers).

`catalogue.py` lists the operators with what they take, give and refuse; docs/reference/operators/ is made from it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels.operators.catalogue import OPERATORS
from moeserve.kernels.operators.checks import check
from moeserve.kernels.planes import repack
from moeserve.quantization import QUANT_TYPES

NAMES = tuple(OPERATORS)


def weight(rows: Tensor, kind: int, shape: tuple[int, ...], device: torch.device | str) -> list[Tensor]:
    """uint8 GGUF bytes of a matrix [rows, cols], or of experts [experts, rows, cols], as `device` reads them: on the
    CPU as they are, on a GPU as planes. ValueError where bytes and shape differ."""
    if torch.device(device).type == "cpu":
        experts, count, _ = (1, *shape) if len(shape) == 2 else shape
        if rows.numel() % (experts * count):
            raise ValueError(f"{rows.numel()} bytes are no {experts} * {count} rows")
        return [rows.reshape(experts, count, -1).contiguous()]
    planes = repack(rows.to(device), QUANT_TYPES[kind], shape)
    return [planes.codes, planes.scales, planes.supers]


def _implement(name: str, device: str) -> Any:
    def call(*arguments: Any) -> Any:
        if device != "meta":
            check(name, arguments)
        # Only now: neither the C++ extension nor Triton is needed before.
        module = importlib.import_module(f"moeserve.kernels.operators.{device}")
        return getattr(module, name)(*arguments)

    return call


def _differentiate(library: torch.library.Library) -> None:
    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, distance, causal, scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(True)
        ctx.options = (distance, causal, scale)

    def gradients(ctx: Any, out_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.moeserve.piecewise_attention_backward(
            *ctx.saved_tensors, out_gradient, *ctx.options
        )
        return (*found, None, None, None)

    torch.library.register_autograd(
        "moeserve::piecewise_attention", gradients, setup_context=remember, lib=library
    )


def _register() -> torch.library.Library:
    library = torch.library.Library("moeserve", "DEF")
    for name, operator in OPERATORS.items():
        library.define(name + operator.schema)
        library.impl(name, _implement(name, "cpu"), "CPU")
        library.impl(name, _implement(name, "cuda"), "CUDA")
        library.impl(name, _implement(name, "meta"), "Meta")
    _differentiate(library)
    return library


_LIBRARY = _register()

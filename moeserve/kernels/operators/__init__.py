"""The kernels as PyTorch operators: one name for C++ on CPU tensors and Triton on CUDA tensors.

    from moeserve.kernels import operators
    w = operators.weight(rows, kind, (out, cols), "cuda")      # GGUF bytes, once
    y = torch.ops.moeserve.linear(x, w, kind)                  # x float32 [n, cols] on w's device

A call allocates its result and has no other effect. This package is for other programs, which find every kernel
under one name on any device. It imports nothing of the server, and the server imports nothing of it, including its
parts `pointwise` (kernels made from expressions) and `piecewise` (attention with two embeddings). The engines and
the kernels' own tests call the layer below: `cpu_stream.py`, and the `op.py` of each operator's folder. That layer
writes into given memory, does not wait, and has options that the operators lack (windows, biases, other routers).

`catalogue.py` lists the operators with their arguments, results and errors; docs/reference/operators/ is made from
it.
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
    """Returns a matrix [rows, cols], or experts [experts, rows, cols], from uint8 GGUF bytes in the form that
    `device` reads: on the CPU unchanged, on a GPU as planes. Raises ValueError if bytes and shape do not match."""
    if torch.device(device).type == "cpu":
        experts, count, _ = (1, *shape) if len(shape) == 2 else shape
        if rows.numel() % (experts * count):
            raise ValueError(f"{rows.numel()} bytes are not {experts} * {count} rows")
        return [rows.reshape(experts, count, -1).contiguous()]
    planes = repack(rows.to(device), QUANT_TYPES[kind], shape)
    return [planes.codes, planes.scales, planes.supers]


def _implement(name: str, device: str) -> Any:
    def call(*arguments: Any) -> Any:
        if device != "meta":
            check(name, arguments)
        # Imported late: a process without weights needs neither the C++ extension nor Triton.
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

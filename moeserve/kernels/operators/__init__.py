"""The kernels as PyTorch operators: one name, C++ on CPU tensors, Triton on CUDA ones.

    from moeserve.kernels import operators
    w = operators.weight(rows, kind, (out, cols), "cuda")      # GGUF bytes, once
    y = torch.ops.moeserve.linear(x, w, kind)                  # x float32 [n, cols] on w's device

A call allocates its result and is complete in itself: the way in for other programs, which find every kernel under one
name whatever the device. Nothing of the server goes through here, nor do the kernels' own tests and benchmarks: they
call what is below (`cpu_stream.py`, the `op.py` of each operator's folder), which writes into given memory, waits for
nothing and has options that these names leave out (windows, biases, other routers). tests/kernels/test_operators.py
holds both devices to the references.

Tensors are contiguous, n is at least 1. A weight is a list of tensors in its device's form with its `kind`, ggml's
number. What an operator computes is specified in the `reference.py` of the folder named first below; activations are
rounded to int8 per 32 columns or, many rows on a GPU, to bfloat16.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from moeserve.kernels.planes import repack
from moeserve.quantization import QUANT_TYPES

# Schema, and the shape and type of what it gives.
_SCHEMAS = {
    # embed. ids int32 [n]. Gives float32 [n, cols].
    "embed": "(Tensor ids, Tensor[] table, int kind, int cols) -> Tensor",
    # norm. x float32 [n, cols], weight float32 [cols]. Gives float32 [n, cols].
    "norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    # linear. x float32 [n, cols], a weight [rows, cols]. Gives float32 [n, rows].
    "linear": "(Tensor x, Tensor[] weight, int kind) -> Tensor",
    # rope. q [n, heads, dim], k and v [n, kv_heads, dim], float32; q_norm, k_norm float32 [dim]; cos, sin float32
    # [n, dim / 2]; slots int32 [n]; keys, values float16 [slots, kv_heads, dim]. Gives q, float32.
    "rope_store": (
        "(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps, Tensor cos, Tensor sin, Tensor slots, "
        "Tensor(a!) keys, Tensor(b!) values) -> Tensor"
    ),
    # attention, of sequences: rows rows[i] .. + counts[i] - 1 of q, at positions[i] on, see the slots
    # table[req_slots[i]], int32 [requests, length]. q float32 [n, heads, dim], scaled. rows, counts, positions and
    # req_slots int32 on the CPU. Gives float32 [n, heads * dim].
    "attention": (
        "(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor rows, Tensor counts, Tensor positions, "
        "Tensor req_slots) -> Tensor"
    ),
    # routing. logits float32 [n, experts]. Gives ids int32 and weights float32 [n, top_k].
    "route": "(Tensor logits, int top_k) -> (Tensor, Tensor)",
    # experts. x float32 [n, hidden]; ids and weights of `route`; gate and up [experts, ff, hidden], down [experts,
    # hidden, ff]. Gives float32 [n, hidden].
    "experts": (
        "(Tensor x, Tensor ids, Tensor weights, Tensor[] gate, int gate_kind, Tensor[] up, int up_kind, "
        "Tensor[] down, int down_kind) -> Tensor"
    ),
    # sampling. logits float32 [n, vocab]; temperature, top_p, min_p float64, top_k int32, seeds, positions int64 [n],
    # on the CPU. Gives int32 [n] tokens.
    "sample": (
        "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions) "
        "-> Tensor"
    ),
}
NAMES = tuple(_SCHEMAS)


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
        # Only now: neither the C++ extension nor Triton is needed before.
        module = importlib.import_module(f"moeserve.kernels.operators.{device}")
        return getattr(module, name)(*arguments)

    return call


def _register() -> torch.library.Library:
    library = torch.library.Library("moeserve", "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _implement(name, "cpu"), "CPU")
        library.impl(name, _implement(name, "cuda"), "CUDA")
        library.impl(name, _implement(name, "meta"), "Meta")
    return library


_LIBRARY = _register()

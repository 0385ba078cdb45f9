"""Checks whether the GPU engine can gather the inputs of a model's matrices in the order of their columns, before
anything is loaded."""

from __future__ import annotations

from typing import Final

import numpy as np

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource

# Gate and up are computed from one input: their orders must agree.
_PAIRS: Final = {
    n.FFN_GATE: n.FFN_UP,
    n.FFN_GATE_SHEXP: n.FFN_UP_SHEXP,
    n.FFN_GATE_EXPS: n.FFN_UP_EXPS,
}
# Matrices whose products gather their input.
_GATHERED: Final = frozenset(
    (
        *(n.ATTN_Q, n.ATTN_K, n.ATTN_V, n.ATTN_GATE, n.ATTN_QKV, n.ATTN_OUTPUT),
        *(n.ATTN_Q_A, n.ATTN_Q_B, n.ATTN_KV_A_MQA, n.SSM_IN, n.SSM_OUT, n.SHORT_CONV_IN, n.SHORT_CONV_OUT),
        n.FFN_GATE_INP,
        *_PAIRS,
        *_PAIRS.values(),
    )
)


def check_gpu_orders(source: ModelSource, *, is_shared: bool) -> None:
    """Checks that the GPU engine can compute with the columns' orders. is_shared: several GPUs share the model. Raises
    ModelError for the first tensor whose order the GPU engine cannot compute with."""
    for name, tensor in source.tensors.items():
        part = _part_of(name)
        if tensor.order is not None and (is_shared or part not in _GATHERED):
            reason = (
                "several GPUs cannot divide such a tensor"
                if is_shared
                else "only the CPU engine reads this one"
            )
            remedy = "one GPU, or if that is refused too, with --device cpu" if is_shared else "--device cpu"
            raise ModelError(
                source.path,
                f"the columns of tensor {name!r} are reordered by activation (desc_act, actorder); {reason}: run the "
                f"model with {remedy}, or download a checkpoint without it",
            )
        if (other := _PAIRS.get(part)) is None:
            continue
        pair = source.tensors.get(name.removesuffix(n.of_part(part)) + n.of_part(other))
        if pair is not None and not _equal(tensor.order, pair.order):
            raise ModelError(
                source.path,
                f"tensors {name!r} and {pair.name!r} have their columns in different orders (desc_act, actorder), "
                "which only the CPU engine reads: run the model with --device cpu, or download a checkpoint without it",
            )


def _part_of(name: str) -> str:
    """Returns the part of a layer's weight; other names as they are."""
    return name if n.layer_of(name) is None else name.split(".", 2)[2].removesuffix(".weight")


def _equal(one: object, other: object) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)  # type: ignore[arg-type]

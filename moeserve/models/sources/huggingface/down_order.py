"""Feed-forwards whose down-projection was quantised in act-order: their rows of gate and up are put into that order,
so that the intermediate values come in the order in which the down-projection reads them, at no cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from moeserve.models.errors import ModelError, SettingError

from .column_order import Order
from .made_tensor import Bytes, bytes_of, numbers_of
from .safetensors_file import PackedWeight, StoredTensor

# The down-projection's name, and the names of the matrices whose product it reads; a missing name is skipped.
_INPUTS: Mapping[str, tuple[str, ...]] = {
    "down_proj": ("gate_proj", "up_proj"),
    "w2": ("w1", "w3"),
}


def move_orders_into_rows(path: Path, stored: dict[str, StoredTensor]) -> None:
    """Replaces each ordered down-projection by one without an order, and the matrices before it by matrices whose rows
    are in that order. Raises ModelError if those matrices are not found."""
    for name, down in list(stored.items()):
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in _INPUTS or down.packed is None or down.packed.order is None:
            continue
        order = down.packed.order
        inputs = [f"{prefix}.{each}.{of}" for each in _INPUTS[part] for of in ("weight", "bias")]
        found = [each for each in inputs if each in stored]
        if not any(each.endswith(".weight") for each in found):
            raise ModelError(
                path,
                f"tensor {name!r} has its columns in the order of their activations (desc_act), and the matrices "
                f"before it are not {' and '.join(_INPUTS[part])}: not supported; download a checkpoint without it, "
                "or a GGUF file",
            )
        for each in found:
            if stored[each].shape[0] != len(order):
                raise SettingError(path, f"tensors {each!r} and {name!r} do not fit one another")
            stored[each] = _with_rows(stored[each], order)
        stored[name] = replace(down, packed=replace(down.packed, order=None))


def _with_rows(tensor: StoredTensor, rows: Order) -> StoredTensor:
    packed = tensor.packed
    if packed is not None:
        make = packed.make
        return replace(tensor, packed=replace(packed, make=lambda: make()[rows], rows=rows))
    kind = tensor.float_type

    def made() -> Bytes:
        return bytes_of(numbers_of(tensor)[rows]).reshape(len(rows), -1)

    return replace(tensor, scales=None, packed=PackedWeight(kind, made, (tensor,), rows=rows))

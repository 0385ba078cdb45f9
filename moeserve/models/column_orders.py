"""Buffer sizes for matrices whose columns are in another order than their input (quantised in act-order). No torch."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.models.sources.source import ModelSource


@dataclass(frozen=True, slots=True)
class ColumnOrders:
    """The column orders of a model's act-order matrices. A product's input is gathered in the order of its matrix."""

    num_columns: int  # columns of all orders together; each takes an int32
    most_columns: int  # the widest gathered input per token; routed experts gather one input per route
    expert_columns: int  # the same for routed experts only; 0: they have no orders
    moved_rows: frozenset[str]  # tensors whose rows are in the order of the next matrix's columns


def column_orders(source: ModelSource) -> ColumnOrders | None:
    """Returns the orders of an opened model; None if it has none."""
    ordered = [tensor for tensor in source.tensors.values() if tensor.order is not None]
    moved = frozenset(name for name, tensor in source.tensors.items() if tensor.row_order is not None)
    if not ordered and not moved:
        return None
    columns = [0 if tensor.order is None else tensor.order.size for tensor in ordered]
    return ColumnOrders(
        sum(columns),
        max((t.shape[-1] for t in ordered), default=0),
        max((t.shape[-1] for t in ordered if len(t.shape) == 3), default=0),
        moved,
    )

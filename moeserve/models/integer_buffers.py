"""The buffers of products with weights as integers in float16 on a GPU (kernels/linear/integers.py). No torch."""

from __future__ import annotations

from moeserve.kernels.linear.integer_pieces import has_whole_super_blocks, partial_numbers
from moeserve.kernels.linear.wide_matrices import WIDE_COLUMNS, WIDE_GEMV_TOKENS
from moeserve.models.buffers import Buffer
from moeserve.models.interface import ModelShape

# Steps of this number of rows multiply attention's matrices so (whole steps of 128 rows 1.014 times as fast, of 256
# within 0.4%). Smaller steps, of more than WIDE_GEMV_TOKENS rows, multiply wide matrices so.
DENSE_INTEGER_ROWS = range(9, 129)


def integer_rows(name: str, rows: int, cols: int) -> list[Buffer]:
    """Returns the buffers of kernels/linear/integers.IntegerRows."""
    sums = -(-cols // 16)
    return [
        Buffer(name, (rows, cols), "float16"),
        Buffer(f"{name}_sums", (rows, sums), "float16"),
        Buffer(f"{name}_factors", (rows,)),
    ]


def dense_integer_buffers(model: ModelShape, rows: int) -> list[Buffer]:
    """Returns the buffers of products with whole matrices in steps of up to `rows` rows; none if none has integers."""
    cols = _most_columns(model, rows)
    if not cols:
        return []
    return [*integer_rows("integer_y", rows, cols), Buffer("integer_partials", (partial_numbers(rows),))]


def _most_columns(model: ModelShape, rows: int) -> int:
    """Returns the most columns that a whole matrix has whose product in steps of `rows` rows takes integers; 0: there
    is no such matrix."""
    inputs = [model.hidden_size, model.mixed_width]
    if rows in DENSE_INTEGER_ROWS and any(map(has_whole_super_blocks, inputs)):
        q_rank = 0 if model.latent is None else model.latent.q_rank
        return max(*inputs, q_rank, model.layer_input_width, model.latent_expert_width)
    if not WIDE_GEMV_TOKENS < rows < DENSE_INTEGER_ROWS.start:
        return 0
    inputs.append(model.dense_width)
    return max((cols for cols in inputs if cols > WIDE_COLUMNS and has_whole_super_blocks(cols)), default=0)

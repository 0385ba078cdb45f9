"""The inputs of a GPU step, declared once, as columns of one int32 buffer that is uploaded by one copy.

`StepColumns` declares each column's name, width and padding. `ColumnLayout` derives its offset in the buffer and the
views on host and device. A new per-row input (drafts, spans) is one line here and one line in `StepInputs.fill`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

from moeserve.models.blocks.gpu.workspace import MIXED_DECODE_ROWS

ALIGN: Final = 4  # in int32s (16 bytes): kernels are compiled for addresses aligned to this
MIXED_CALLS: Final = 4  # calls of decode attention beside prompts in one graph
MAX_GRAPH_DECODE: Final = (
    MIXED_CALLS * MIXED_DECODE_ROWS
)  # rows with decode attention in a graph with prompts

Buffer = TypeVar("Buffer", bound="_Sliceable")
View = TypeVar("View")
Padding = int | Literal["dummy slot"]


class _Sliceable(Protocol):
    """A numpy array or a tensor."""

    def __getitem__(self, part: slice, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class ColumnSizes:
    """The number of entries of columns, for one step size. 0: the column does not exist."""

    rows: int
    sampled: int  # sampled rows, and the padding of the head's last call
    head_calls: int
    states: int = 0  # sequences with recurrent state
    state_drafts: int = 0  # sequences with recurrent state, if they may have drafts
    state_rows: int = 0
    window_rows: int = 0  # rows, if windowed layers have separate KV slots
    adapter_rows: int = 0
    section_rows: int = 0  # rows, if they have three RoPE positions
    block_rows: int = 0  # the same, if a next-token block has rows of its own
    first_rows: int = 0  # the same, if an indexer chooses blocks of keys
    ahead_rows: int = 0  # rows, if the rows of an embedding span see the whole span
    tiles: int = 0
    mixed_calls: int = 1  # calls of decode attention beside prompts
    one: int = 1


class Column(NamedTuple):
    width: str  # a field of `ColumnSizes`
    of: int = 1  # int32s per entry
    padding: Padding | None = None  # value of the entries beyond a step's own; None: they are not read


@dataclass(slots=True)
class StepColumns(Generic[View]):
    """The columns of one step, int32: [width], or [width, of] if `Column.of` is above 1. A single number that a kernel
    reads through a pointer takes ALIGN int32s: it is the first, the others are padding."""

    num_rows: Annotated[View, Column("one", of=ALIGN)]
    head_rows: Annotated[View, Column("head_calls", of=ALIGN)]  # rows sampled by each call of the head
    mixed_rows: Annotated[
        View, Column("mixed_calls", of=ALIGN)
    ]  # rows of each call of decode attention beside prompts
    # EMBEDDED: an embedding; other negative values: tokens still being sampled (`Sequences.expect`)
    token_ids: Annotated[View, Column("rows", padding=0)]
    positions: Annotated[View, Column("rows", padding=0)]
    kv_slots: Annotated[View, Column("rows", padding=-1)]
    req_slots: Annotated[View, Column("rows", padding="dummy slot")]
    sampled_rows: Annotated[View, Column("sampled")]
    sampled_slots: Annotated[View, Column("sampled")]  # their request slots
    state_first: Annotated[View, Column("states", padding=0)]  # first row of each sequence
    state_count: Annotated[View, Column("states", padding=0)]  # rows of each sequence
    state_slots: Annotated[View, Column("states", padding=0)]
    draft_count: Annotated[View, Column("state_drafts", padding=0)]  # drafts of each sequence, its last rows
    draft_first: Annotated[View, Column("state_drafts", padding=0)]  # record of its first draft
    row_sequence: Annotated[View, Column("state_rows")]
    window_slots: Annotated[View, Column("window_rows", padding=-1)]
    adapter_slots: Annotated[View, Column("adapter_rows", padding=-1)]  # -1: no adapter
    rotary_positions: Annotated[View, Column("section_rows", of=3, padding=0)]
    # of the tokens before them: a next-token block's rows
    rotary_before: Annotated[View, Column("block_rows", of=3, padding=0)]
    # of the first tokens of their blocks of keys, for an indexer of blocks
    rotary_firsts: Annotated[View, Column("first_rows", of=3, padding=0)]
    ends: Annotated[View, Column("ahead_rows", padding=0)]  # number of positions that each row sees
    tiles: Annotated[View, Column("tiles", of=4)]  # tiles of a graph with prompts: attention.op.prefill_tiles


DECLARED: Final[dict[str, Column]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(StepColumns, include_extras=True).items()
}


class ColumnLayout:
    """The offset of each column in a buffer of `num_ints` int32s."""

    def __init__(self, sizes: ColumnSizes) -> None:
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.num_ints = 0
        for name, column in DECLARED.items():
            width = getattr(sizes, column.width)
            shape = (width,) if column.of == 1 else (width, column.of)
            self._places[name] = self.num_ints, shape
            self.num_ints += -(-prod(shape) // ALIGN) * ALIGN

    def views(self, buffer: Buffer) -> StepColumns[Any]:
        """Returns views of the columns. buffer: int32 [num_ints], an array or a tensor."""
        return StepColumns(
            **{
                name: buffer[at : at + prod(shape)].reshape(shape)
                for name, (at, shape) in self._places.items()
            }
        )


def padded_columns(
    columns: StepColumns[npt.NDArray[np.int32]], width: str, dummy_slot: int
) -> Iterator[tuple[npt.NDArray[np.int32], int]]:
    """Yields the existing columns of one width (int32 arrays), each with the number that pads it."""
    for name, column in DECLARED.items():
        values = getattr(columns, name)
        if column.width == width and column.padding is not None and len(values):
            yield values, dummy_slot if column.padding == "dummy slot" else column.padding

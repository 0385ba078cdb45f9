"""Describes a comparison in sentences and a table."""

from __future__ import annotations

from collections.abc import Iterator

from moeserve.cli.compare_dumps.compare import Cell, Difference, Result, TensorPlace, Tolerances
from moeserve.cli.compare_dumps.reader import Dump
from moeserve.worker.recording.dump_format import EMBEDDING, IDS, LAYER_TENSORS, LOGITS


def report(result: Result, tolerances: Tolerances) -> Iterator[str]:
    """Returns the lines of the report."""
    yield _source("A", result.a)
    yield _source("B", result.b)
    yield from _matched(result)
    yield ""
    yield from _verdict(result, tolerances)
    for side, (place, pair) in sorted(result.not_finite.items()):
        dump, rows = (result.a, result.pairs.a) if side == "A" else (result.b, result.pairs.b)
        yield f"{side} has values that are not finite, first in {_of(place)}: {_row(dump, int(rows[pair]))}"
    yield ""
    yield from _table(result)


def _source(side: str, dump: Dump) -> str:
    about = [str(dump.about[key]) for key in ("model", "engine", "version") if dump.about.get(key)]
    steps, rows = len(dump.steps), len(dump.rows.context)
    return f"{side}: {dump.folder}: {', '.join([*about, f'{steps} steps', f'{rows} rows'])}"


def _matched(result: Result) -> Iterator[str]:
    yield f"{len(result.pairs)} rows are in both: the same token after the same tokens"
    for side, dump, rows in (("A", result.a, result.pairs.only_a), ("B", result.b, result.pairs.only_b)):
        if len(rows):
            yield f"{len(rows)} rows are only in {side}, first: {_row(dump, int(rows[0]))}"


def _verdict(result: Result, tolerances: Tolerances) -> Iterator[str]:
    if result.first is None:
        yield f"No difference beyond the tolerance of {tolerances.plain:g}."
        return
    yield from _first_difference(result, result.first, tolerances)


def _first_difference(result: Result, d: Difference, tolerances: Tolerances) -> Iterator[str]:
    yield f"The first difference: {_of(d.place)}"
    yield f"  in A: {_row(result.a, int(result.pairs.a[d.pair]))}"
    yield f"  in B: {_row(result.b, int(result.pairs.b[d.pair]))}"
    if d.experts is not None:
        only_a, only_b = (", ".join(map(str, ids)) for ids in d.experts)
        yield f"  A chose the experts {only_a}, B in their place {only_b}, and the router's logits do not explain it"
    else:
        tie = ", as it is past a near tie" if d.limit > tolerances.plain else ""
        yield f"  relative distance {d.relative:.3g}, tolerance {d.limit:.3g}{tie}"
    if d.values is not None:
        column, a, b = d.values
        yield f"  the largest is in column {column}: {a:.6g} in A, {b:.6g} in B"
    cell = result.cells[d.place]
    yield f"  of the {cell.rows} rows of {_of(d.place)}, {cell.differ} differ"


def _of(place: TensorPlace) -> str:
    return place.tensor if place.layer is None else f"layer {place.layer}, {place.tensor}"


def _row(dump: Dump, index: int) -> str:
    rows = dump.rows
    step, slot = int(rows.step[index]), int(rows.slot[index])
    request = dump.steps[step].requests.get(str(slot), "")
    return (
        f"step {step}, row {rows.row[index]}: "
        + (f"request {request}, " if request else "")
        + f"position {rows.position[index]}, token {rows.token[index]}"
    )


def _table(result: Result) -> Iterator[str]:
    yield "Relative distance of the worst row; * beyond the tolerance. Rows past a near tie are counted apart."
    yield from _outside(result, EMBEDDING)
    layers = sorted({place.layer for place in result.cells if place.layer is not None})
    lines = [_HEADS, *(_line(result, layer) for layer in layers)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)).rstrip()
    yield from _outside(result, LOGITS)
    if result.num_logits:
        yield f"most likely token: the same in {result.same_top} of {result.num_logits} rows"
    if result.num_sampled:
        yield f"sampled token: the same in {result.same_sampled} of {result.num_sampled} rows"


_FLOATS = [tensor for tensor in LAYER_TENSORS if tensor != IDS]
_HEADS = ["layer", *_FLOATS, "other experts", "near ties", "rows past one", "their worst"]


def _line(result: Result, layer: int) -> list[str]:
    values = {tensor: result.cells.get(TensorPlace(layer, tensor), Cell()) for tensor in _FLOATS}
    ids = result.cells.get(TensorPlace(layer, IDS), Cell())
    tied = max(cell.tied for cell in values.values())
    worst = max(cell.worst_tied for cell in values.values())
    return [
        str(layer),
        *map(_shown, values.values()),
        f"{ids.other}{'*' if ids.differ else ''}" if ids.rows else "",
        str(ids.ties) if ids.rows else "",
        str(tied),
        f"{worst:.1e}" if tied else "",
    ]


def _outside(result: Result, tensor: str) -> Iterator[str]:
    """Returns the line about a tensor that does not belong to a layer."""
    cell = result.cells.get(TensorPlace(None, tensor))
    if cell is not None:
        tied = f"of {cell.tied} rows past a near tie {cell.worst_tied:.1e}" if cell.tied else ""
        yield f"{tensor}: " + ", ".join(part for part in (_shown(cell), tied) if part)


def _shown(cell: Cell) -> str:
    star = "*" if cell.differ else ""
    return f"{cell.worst:.1e}{star}" if cell.rows > cell.tied else star

"""How a count is declared: on the field that holds it.

    aborts: Annotated[int, Metric("counter", "num_aborts", "Requests whose client disconnected.")] = 0

The router raises the field. The totals across a router's loss, `/metrics`, its reference page and the dashboard follow
from the declaration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeVar, get_type_hints

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
# Of a field's values. A metric's are in seconds and bytes.
Unit = Literal["", "tokens", "bytes", "ms"]
_SCALE: Final[dict[Unit, float]] = {"ms": 1e-3}

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)


class Metric(msgspec.Struct, frozen=True):
    """A field's metric. The values of counters and histograms only grow while their process lives."""

    kind: Kind
    name: str  # after "moeserve:", and before a counter's "_total"
    help: str
    unit: Unit = ""

    @property
    def scale(self) -> float:
        """The metric's value / the field's value."""
        return _SCALE.get(self.unit, 1)


class Family(msgspec.Struct, frozen=True):
    """A field that is a struct of counts. `prefix` goes before their metrics' names, `place` into their help's "{}"."""

    prefix: str
    place: str = ""


class Declared(msgspec.Struct, frozen=True):
    """A metric, and the names of the fields that lead to its value."""

    metric: Metric
    path: tuple[str, ...]

    def value_in(self, struct: msgspec.Struct) -> Any:
        """A number or HistogramCounts, in the field's unit."""
        value: Any = struct
        for name in self.path:
            value = getattr(value, name)
        return value


class HistogramCounts(msgspec.Struct, array_like=True):
    """counts[i] is the number of values <= bounds[i] and above bounds[i-1]; the last count is of those above all."""

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> HistogramCounts:
        return cls(list(bounds), [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def __add__(self, other: HistogramCounts) -> HistogramCounts:
        """Both have the same bounds."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return HistogramCounts(self.bounds, counts, self.sum + other.sum)


@cache
def declared_metrics(struct: type[msgspec.Struct]) -> tuple[Declared, ...]:
    """The metrics of a struct's fields, in their order, with those of the structs in it."""
    return tuple(_declared(struct, Family(""), ()))


def _declared(struct: type[msgspec.Struct], family: Family, path: tuple[str, ...]) -> Iterator[Declared]:
    for name, annotation in get_type_hints(struct, include_extras=True).items():
        for declaration in getattr(annotation, "__metadata__", ()):
            if isinstance(declaration, Family):
                yield from _declared(annotation.__origin__, declaration, (*path, name))
            elif isinstance(declaration, Metric):
                metric = msgspec.structs.replace(
                    declaration,
                    name=family.prefix + declaration.name,
                    help=declaration.help.format(family.place),
                )
                yield Declared(metric, (*path, name))


def with_totals_of(before: AnyStruct, now: AnyStruct) -> AnyStruct:
    """Returns a copy of `now`, to whose counters and histograms those of `before` are added."""
    changed: dict[str, Any] = {}
    for declared in declared_metrics(type(now)):
        name = declared.path[0]
        if name in changed:
            continue
        old, new = getattr(before, name), getattr(now, name)
        if len(declared.path) > 1:
            changed[name] = with_totals_of(old, new)
        elif declared.metric.kind != "gauge":
            changed[name] = old + new
    return msgspec.structs.replace(now, **changed)

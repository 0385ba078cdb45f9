"""Metrics are declared at the fields that hold their counts:

    aborts: Annotated[int, Metric("counter", "num_aborts", "Requests whose client disconnected.")] = 0

The router increases the field. The totals that survive a lost router, `/metrics`, its reference page and the dashboard
follow from the declaration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeVar, get_type_hints

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
# Units of a field's values. The exported metric is in seconds or bytes.
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
        """The factor from the field's value to the metric's."""
        return _SCALE.get(self.unit, 1)


class Family(msgspec.Struct, frozen=True):
    """Marks a field that is a struct of counts. `prefix` is put before their metrics' names, and `place` replaces "{}"
    in their help."""

    prefix: str
    place: str = ""


class Declared(msgspec.Struct, frozen=True):
    """A metric, and the names of the fields that lead to its value."""

    metric: Metric
    path: tuple[str, ...]

    def value_in(self, struct: msgspec.Struct) -> Any:
        """Returns the metric's number or HistogramCounts, in the field's unit."""
        value: Any = struct
        for name in self.path:
            value = getattr(value, name)
        return value


class HistogramCounts(msgspec.Struct, array_like=True):
    """The counts of a histogram: counts[i] is the number of values <= bounds[i] and above bounds[i-1]; the last count
    is the number of values above all bounds."""

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
        """Returns the sum, field by field. Both must have the same bounds."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return HistogramCounts(self.bounds, counts, self.sum + other.sum)


@cache
def declared_metrics(struct: type[msgspec.Struct]) -> tuple[Declared, ...]:
    """Returns the metrics of a struct's fields, in their order, nested structs included."""
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
    """Returns a copy of `now` in which the counters and histograms of `before` are added."""
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

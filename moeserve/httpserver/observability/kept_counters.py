"""Counters that outlive their process: a file has their totals, and the next process continues from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from moeserve.httpserver.observability.kept_file import read_kept, write_kept

_COUNTING: Final = frozenset({"counter", "histogram"})


class _Total(msgspec.Struct, array_like=True, frozen=True):
    family: str
    name: str  # of the sample: the family's name with _total, _bucket, _sum or _count
    labels: dict[str, str]
    value: float


_Key = tuple[str, tuple[tuple[str, str], ...]]


class KeptCounters(Collector):
    """Adds the totals of the server's earlier processes to each counter and histogram of `counted`, so that they
    continue after a restart. Each collection writes the file before its samples are shown, so a counter never falls
    below a value that a scrape has shown. If the process is killed, counts after its last collection are lost."""

    def __init__(self, counted: CollectorRegistry, file: Path | None) -> None:
        """Reads `file`, which need not exist. None: nothing is kept."""
        self._counted = counted
        self._file = file
        self._before = {} if file is None else _read(file)

    def collect(self) -> Iterator[Metric]:
        totals: list[_Total] = []
        families = [self._continued(family, totals) for family in self._counted.collect()]
        if self._file is not None:
            write_kept(self._file, totals)
        yield from families

    def keep(self) -> None:
        """Writes the file."""
        for _ in self.collect():
            pass

    def _continued(self, family: Metric, totals: list[_Total]) -> Metric:
        """Returns the family with the earlier totals added, and appends its new totals to `totals`."""
        if family.type not in _COUNTING:
            return family
        left = dict(self._before.get(family.name, {}))
        samples = []
        for sample in family.samples:
            before = left.pop(_key(sample.name, sample.labels), 0.0)
            samples.append(sample._replace(value=sample.value + before))
        # This process has not counted anything under these labels yet.
        samples += [Sample(name, dict(labels), value) for (name, labels), value in left.items()]
        totals += [_Total(family.name, each.name, each.labels, each.value) for each in samples]
        # A copy: a registry's collectors may return the same object each time.
        continued = Metric(family.name, family.documentation, family.type, family.unit)
        continued.samples = samples
        return continued


def _key(name: str, labels: dict[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))


def _read(file: Path) -> dict[str, dict[_Key, float]]:
    """Returns the totals by family and sample."""
    found = read_kept(file, list[_Total]) or []
    families: dict[str, dict[_Key, float]] = {}
    for total in found:
        families.setdefault(total.family, {})[_key(total.name, total.labels)] = total.value
    return families

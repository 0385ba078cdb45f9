"""Counters that outlive their process: a file has their totals, and the next process continues from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

_COUNTING: Final = frozenset({"counter", "histogram"})

log = logging.getLogger(__name__)


class _Total(msgspec.Struct, array_like=True, frozen=True):
    family: str
    name: str  # of the sample: the family's name with _total, _bucket, _sum or _count
    labels: dict[str, str]
    value: float


_Key = tuple[str, tuple[tuple[str, str], ...]]


class KeptCounters(Collector):
    """Adds the totals of the processes before this one to each counter and histogram of `counted`.

    Each collection writes the file before its samples are shown. So no counter falls that a scrape has shown. If the
    process is killed, what it counted after its last collection is lost.
    """

    def __init__(self, counted: CollectorRegistry, file: Path) -> None:
        """Reads `file`, which need not exist. A file that cannot be read counts as empty."""
        self._counted = counted
        self._file = file
        self._before = _read(file)
        self._is_warned = False

    def collect(self) -> Iterator[Metric]:
        totals: list[_Total] = []
        families = [self._continued(family, totals) for family in self._counted.collect()]
        self._write(totals)
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

    def _write(self, totals: list[_Total]) -> None:
        temporary = self._file.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(totals))
            os.replace(temporary, self._file)
        except OSError as error:
            if not self._is_warned:
                self._is_warned = True
                log.warning("the counters begin at 0 if this process is lost: %s", error)


def _key(name: str, labels: dict[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))


def _read(file: Path) -> dict[str, dict[_Key, float]]:
    """Returns the totals by family and sample."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=list[_Total])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("the counters begin at 0: %s: %s", file, error)
        return {}
    families: dict[str, dict[_Key, float]] = {}
    for total in found:
        families.setdefault(total.family, {})[_key(total.name, total.labels)] = total.value
    return families

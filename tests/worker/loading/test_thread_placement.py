"""Which cores and NUMA nodes the compute threads get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeserve.errors import ConfigError
from moeserve.kernels.stream_operands import ThreadPlacement
from moeserve.worker.loading.cpu.thread_placement import memory_nodes, place_threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sysfs of two NUMA nodes of two cores of two hyper-threads: CPUs 0-3 and 8-11, siblings 0,1 and 2,3 and so
    on; CPU 3 is outside our cpuset."""
    nodes = tmp_path / "devices/system/node"
    for node, cpus in enumerate(("0-3", "8-11")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}/cpulist").write_text(cpus + "\n")
    (nodes / "node10").mkdir()
    (nodes / "node10/cpulist").write_text("\n")  # a node of memory only
    for cpu in (0, 1, 2, 3, 8, 9, 10, 11):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu & ~1},{cpu | 1}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 8, 9, 10, 11})
    return tmp_path


def test_nodes_hold_only_the_cpus_of_our_cpuset(machine: Path) -> None:
    assert memory_nodes(machine) == [[0, 1, 2], [8, 9, 10, 11]]


def test_threads_are_divided_among_the_nodes_and_bound_to_them(machine: Path) -> None:
    assert place_threads(3, None, "nodes", machine) == [
        ThreadPlacement(0, (0, 1, 2)),
        ThreadPlacement(1, (8, 9, 10, 11)),
        ThreadPlacement(1, (8, 9, 10, 11)),
    ]


def test_a_core_each_is_both_of_its_hyper_threads(machine: Path) -> None:
    assert place_threads(4, None, "cores", machine) == [
        ThreadPlacement(0, (0, 1)),
        ThreadPlacement(0, (2,)),
        ThreadPlacement(1, (8, 9)),
        ThreadPlacement(1, (10, 11)),
    ]


def test_auto_gives_cores_while_there_are_enough(machine: Path) -> None:
    assert place_threads(4, None, "auto", machine) == place_threads(4, None, "cores", machine)
    assert place_threads(6, None, "auto", machine) == place_threads(6, None, "nodes", machine)


def test_one_thread_needs_one_node(machine: Path) -> None:
    assert place_threads(1, None, "none", machine) == [ThreadPlacement(0, ())]


def test_logical_nodes_divide_the_cpus(machine: Path) -> None:
    places = place_threads(3, 3, "nodes", machine)
    assert [place.node for place in places] == [0, 1, 2]
    assert sorted(cpu for place in places for cpu in place.cpus) == [0, 1, 2, 8, 9, 10, 11]


def test_more_threads_than_cores_cannot_be_bound(machine: Path) -> None:
    with pytest.raises(ConfigError, match="5 threads"):
        place_threads(10, None, "cores", machine)


def test_fewer_threads_than_nodes_are_refused(machine: Path) -> None:
    with pytest.raises(ConfigError, match="--threads"):
        place_threads(1, 2, "auto", machine)

"""What our control groups leave us, from copies of the files that Linux shows."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from moeserve.processes import free_memory as memory
from moeserve.processes.control_groups import (
    MemoryKills,
    cpu_quota,
    memory_kills,
    memory_left,
    memory_limit,
    tasks_allowed,
    tasks_left,
    unused_memory,
)
from moeserve.processes.cpus import pool_threads, usable_cores, usable_cpus

MIB = 1 << 20
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"


def machine(tmp_path: Path, groups: str, *mounts: str) -> Path:
    """A root folder with our groups, and these mounts."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "\n".join(["23 1 8:1 / / rw - ext4 /dev/sda rw", *mounts]) + "\n"
    )
    return tmp_path


def write(root: Path, folder: str, **files: object) -> None:
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


def test_a_limit_of_the_group_or_of_one_above_it(tmp_path: Path) -> None:
    """systemd: MemoryMax stands at the service, and the process may be in a group below it."""
    root = machine(tmp_path, "0::/system.slice/moeserve.service/worker", V2)
    write(root, ".", memory__stat="")
    write(root, "system.slice", memory__max="max", memory__current=900 * MIB, memory__stat="")
    write(
        root,
        "system.slice/moeserve.service",
        memory__max=500 * MIB,
        memory__high="max",
        memory__current=300 * MIB,
        memory__stat=f"anon {100 * MIB}\nactive_file {60 * MIB}\ninactive_file {40 * MIB}",
    )
    write(root, "system.slice/moeserve.service/worker", memory__max="max", memory__current=100 * MIB)
    assert memory_left(root) == 300 * MIB  # 300 in use, of which 100 are pages of files
    assert unused_memory(root) == [(500 * MIB, 200 * MIB)]
    assert memory_limit(root) == 500 * MIB


def test_what_slows_a_group_down_counts_as_its_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/", V2)
    write(root, ".", memory__max=500 * MIB, memory__high=400 * MIB, memory__current=450 * MIB)
    assert (memory_left(root), memory_limit(root)) == (0, 400 * MIB)


def test_a_container_with_a_namespace_of_its_own_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/", V2)
    write(root, ".", memory__max=256 * MIB, memory__current=56 * MIB, memory__stat="anon 1")
    assert memory_left(root) == 200 * MIB


@pytest.mark.parametrize("part", ["/docker/0123", "/../../docker/0123", "/"])
def test_a_container_in_its_hosts_namespace(tmp_path: Path, part: str) -> None:
    """Its group's path is the host's, its mount may be that group alone, or all of them."""
    mount = f"35 31 0:32 {part} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    root = machine(tmp_path, "4:memory:/docker/0123\n1:name=systemd:/docker/0123", mount)
    write(
        root,
        "memory" if part != "/" else "memory/docker/0123",
        memory__limit_in_bytes=256 * MIB,
        memory__usage_in_bytes=100 * MIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {10 * MIB}",
    )
    assert memory_left(root) == 186 * MIB


def test_version_1_beside_a_version_2_without_controllers(tmp_path: Path) -> None:
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    root = machine(tmp_path, "4:memory:/user\n0::/user", V1_MEMORY, unified)
    write(root, "unified/user", cgroup__procs="1")
    write(
        root, "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5, memory__stat=""
    )
    write(root, "memory/user", memory__limit_in_bytes=MIB, memory__usage_in_bytes=5, memory__stat="")
    assert memory_left(root) == MIB - 5


def test_nothing_limits_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert (memory_left(tmp_path), memory_limit(tmp_path), cpu_quota(tmp_path)) == (None, None, None)


@pytest.mark.parametrize(("quota", "period", "cores"), [("-1", "100000", None), ("250000", "100000", 3)])
def test_cpu_quota_of_version_1(tmp_path: Path, quota: str, period: str, cores: int | None) -> None:
    root = machine(tmp_path, "2:cpu,cpuacct:/a/b", V1_CPU)
    write(root, "cpu,cpuacct/a", cpu__cfs_quota_us=quota, cpu__cfs_period_us=period)
    assert cpu_quota(root) == cores


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [
        ({0, 1, 2, 3}, None, 2),
        ({0, 1}, None, 2),
        ({0, 2}, None, 1),
        ({0, 1, 2, 3}, "100000 100000", 1),
        ({0, 1, 2, 3}, "150000 100000", 2),
        ({0, 1, 2, 3}, "max 100000", 2),
        ({0, 1, 7}, None, 3),
    ],
)
def test_threads_default_to_the_physical_cores_we_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: set[int], quota: str | None, cores: int
) -> None:
    """Two cores of two hyper-threads each: CPUs 0 and 2 share one, 1 and 3 the other; CPU 7 says nothing."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: affinity)
    root = machine(tmp_path, "0::/", V2)
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    if quota is not None:
        write(root, ".", cpu__max=quota)
    assert usable_cores(root) == cores


@pytest.mark.parametrize(("quota", "cpus"), [(None, 4), ("150000 100000", 2), ("900000 100000", 4)])
def test_a_towers_threads_follow_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cpus: int
) -> None:
    """A container with --cpus had a thread for each CPU of the host (ollama/ollama#17916 for another server)."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    root = machine(tmp_path, "0::/", V2)
    if quota is not None:
        write(root, ".", cpu__max=quota)
    assert usable_cpus(root) == cpus


@pytest.mark.parametrize(
    ("groups", "mount"),
    [("0::/service", V2), ("5:pids:/service", "35 31 0:32 / /sys/fs/cgroup rw - cgroup cgroup rw,pids")],
)
def test_a_limit_of_tasks(tmp_path: Path, groups: str, mount: str) -> None:
    root = machine(tmp_path, groups, mount)
    assert tasks_left(root) is None
    write(root, "service", pids__max="max", pids__current=7)
    assert tasks_left(root) is None
    write(root, ".", pids__max=100, pids__current=70)
    assert (tasks_left(root), tasks_allowed(root)) == (30, 100)
    write(root, "service", pids__max=20, pids__current=21)
    assert (tasks_left(root), tasks_allowed(root)) == (0, 20)


def test_kills_for_memory_of_version_2(tmp_path: Path) -> None:
    """The group's own count of killed processes; a group above it may have the limit that was reached."""
    root = machine(tmp_path, "0::/pod/server", V2)
    assert memory_kills(root) is None
    write(root, "pod", memory__events="oom 9\noom_kill 7", memory__events__local="oom 4\noom_kill 0")
    write(
        root,
        "pod/server",
        memory__events="low 0\noom 1\noom_kill 2",
        memory__events__local="oom 1\noom_kill 2",
    )
    assert memory_kills(root) == MemoryKills(killed=2, hits=5)


def test_kills_for_memory_of_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, "4:memory:/user\n0::/user", V1_MEMORY)
    write(
        root, "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 6", memory__failcnt=0
    )
    write(root, "memory/user", memory__oom_control="oom_kill_disable 0\noom_kill 1", memory__failcnt=30)
    assert memory_kills(root) == MemoryKills(killed=1, hits=30)


@pytest.mark.parametrize(
    ("cpus", "device", "driver", "threads"),
    [
        (16, "cuda", False, 15),
        (16, "auto", True, 15),
        (16, "auto", False, 16),
        (16, "cpu", True, 16),
        (8, "cuda", True, 7),
        (4, "cuda", True, 4),
    ],
)
def test_a_gpus_thread_has_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, device: str, driver: bool, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    root = machine(tmp_path, "0::/", V2)
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").touch()
    assert pool_threads(device, root) == threads


def test_a_message_about_memory_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 512 * MIB)
    monkeypatch.setattr(memory, "memory_left", lambda: 100 * MIB)
    assert memory.available_bytes() == 100 * MIB
    assert memory.limit_note() == " (a control group limits this process to 0.50 GiB)"
    monkeypatch.setattr(memory, "memory_left", lambda: 1 << 58)
    assert memory.limit_note() == ""  # the machine has less free
    monkeypatch.setattr(memory, "address_space_left", lambda: memory.SPARE_ADDRESS_SPACE + MIB)
    assert memory.available_bytes() == MIB
    assert memory.limit_note() == " (ulimit -v leaves this process 0.25 GiB)"


def test_free_memory_is_short_below_what_is_needed_and_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached files do not count as free."""
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(total=1600, free=900, available=1600))
    monkeypatch.setattr(memory, "unused_memory", list)
    assert not memory.is_free_memory_short(800)
    assert memory.is_free_memory_short(801)
    monkeypatch.setattr(
        memory, "unused_memory", lambda: [(320, 320), (160, 50)]
    )  # a container's, of 160 in all
    assert not memory.is_free_memory_short(40)
    assert memory.is_free_memory_short(41)

"""Reads the limits of memory, CPU and tasks of this process's control groups (cgroup v1 and v2).

A process belongs to one group per hierarchy, and all groups above it limit it as well: systemd's `MemoryMax` is set
on the service's group, a container's limit on the container's group. `/proc/self/cgroup` names the group;
`/proc/self/mountinfo` says where the hierarchy is mounted and which part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

_ROOT: Final = Path("/")
# cgroup v1 writes "no limit" as the largest multiple of the page size; every value above this one means no limit.
_NO_LIMIT: Final = 1 << 60


class _Memory(NamedTuple):
    """A group's memory in bytes; `left` may still be allocated."""

    limit: int
    used: int  # including cached
    cached: int  # pages of files, which the kernel can reclaim

    @property
    def left(self) -> int:
        return max(0, self.limit - max(0, self.used - self.cached))


class _Files(NamedTuple):
    """File names of a memory group: the limits, the usage, and the counts of memory that the kernel can reclaim."""

    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[str, ...]  # keys in memory.stat


_MEMORY_FILES: Final = (
    # Above memory.high a group is throttled until it is unusable, so it counts as a limit.
    _Files(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def memory_left(root: Path = _ROOT) -> int | None:
    """Returns the bytes that this process may still allocate under its groups' limits; None if no group has a limit.
    Cached file pages count as available, as in MemAvailable, because the kernel reclaims them."""
    return min((memory.left for memory in _memory_groups(root)), default=None)


def unused_memory(root: Path = _ROOT) -> list[tuple[int, int]]:
    """Returns each memory limit of this process's groups, and the bytes below it that are neither in use nor filled
    with cached files."""
    return [(memory.limit, max(0, memory.limit - memory.used)) for memory in _memory_groups(root)]


def memory_limit(root: Path = _ROOT) -> int | None:
    """Returns the lowest memory limit of the groups in bytes; None if there is none."""
    return min((memory.limit for memory in _memory_groups(root)), default=None)


class MemoryKills(NamedTuple):
    """What the kernel has done since the groups were made because memory ran out."""

    killed: int  # processes of this process's own group, for want of the group's memory or of the machine's
    hits: int  # times that a limit of the group, or of one above it, was reached; v1: even if cached files gave way


def memory_kills(root: Path = _ROOT) -> MemoryKills | None:
    """Returns the counts of this process's groups; None if no group counts, such as the root of cgroup v2."""
    groups = list(_groups("memory", root))
    files = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    killed = [count for file in files if (count := _event(file, "oom_kill")) is not None]
    if not killed:
        return None
    hits = [
        _event(group / "memory.events.local", "oom") or _number(group / "memory.failcnt") for group in groups
    ]
    return MemoryKills(killed[0], sum(count or 0 for count in hits))


def cpu_quota(root: Path = _ROOT) -> int | None:
    """Returns the CPU quota of the groups in cores, rounded up; None if there is none."""
    quotas = [cores for group in _groups("cpu", root) if (cores := _cores(group)) is not None]
    return min(quotas, default=None)


def tasks_left(root: Path = _ROOT) -> int | None:
    """Returns how many processes and threads the groups still allow; None if there is no limit."""
    return min((max(0, most - used) for most, used in _task_limits(root)), default=None)


def tasks_allowed(root: Path = _ROOT) -> int | None:
    """Returns how many processes and threads the groups allow in all; None if there is no limit."""
    return min((most for most, _ in _task_limits(root)), default=None)


def _task_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields each limit of processes and threads of this process's groups, and how many there are."""
    for group in _groups("pids", root):
        most, used = _number(group / "pids.max"), _number(group / "pids.current")
        if most is not None and used is not None:
            yield most, used


def _memory_groups(root: Path) -> Iterator[_Memory]:
    """Yields each memory limit of this process's groups, and what is used of it."""
    for group in _groups("memory", root):
        yield from _memory_of(group)


def _memory_of(group: Path) -> Iterator[_Memory]:
    """Yields each memory limit of the group itself."""
    for files in _MEMORY_FILES:
        used = _number(group / files.usage)
        if used is None:
            continue
        counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        cached = sum(int(counts.get(name, "0")) for name in files.file_pages)
        for name in files.limits:
            limit = _number(group / name)  # None for "max", which means no limit
            if limit is not None and limit < _NO_LIMIT:
                yield _Memory(limit, used, cached)


def _cores(group: Path) -> int | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit()):  # "max", -1 or no such file: no quota
        return None
    return math.ceil(int(quota) / int(period))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of this process's groups for a controller, from the process's own group upwards, as far as
    they are mounted."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.is_v2 == (not controllers) and (mount.is_v2 or controller in mount.controllers):
                yield from mount.folders(path, root)


class _Mount(NamedTuple):
    is_v2: bool
    controllers: frozenset[str]  # of a v1 hierarchy, among the mount's other options
    part: PurePosixPath  # the group that is mounted at `point`
    point: PurePosixPath

    def folders(self, path: str, root: Path) -> Iterator[Path]:
        """Yields the folder of the group `path` and those above it. If `path` is outside the mounted part, as in a
        container with its host's cgroup namespace, only the mounted root is yielded: it is the container's own
        group."""
        group = PurePosixPath(path)
        inside = group.relative_to(self.part) if group.is_relative_to(self.part) else PurePosixPath()
        if ".." in inside.parts:
            inside = PurePosixPath()
        for folder in (inside, *inside.parents):
            yield root / self.point.relative_to("/") / folder


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            part, point = (PurePosixPath(_unescaped(field)) for field in before.split(" ")[3:5])
            yield _Mount(kind == "cgroup2", frozenset(options.split(",")), part, point)


def _unescaped(field: str) -> str:
    r"""Decodes mountinfo's octal escapes, such as \040 for a blank."""
    return field.replace("\\040", " ")


def _event(path: Path, name: str) -> int | None:
    """Returns a count of a file that has one per line, such as memory.events; None if it has no such count."""
    counts = (line.split() for line in _text(path).splitlines())
    return next((int(count[1]) for count in counts if count[0] == name), None)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """Returns the file's text; "" if it is missing or not readable."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""The limits of the control groups that this process is in: memory and CPU time (cgroup v1 and v2).

A process belongs to one group of each hierarchy, and every group above it limits it too: systemd's `MemoryMax` stands
at the service's group, a container's limit at the container's. `/proc/self/cgroup` names the group and
`/proc/self/mountinfo` says where its hierarchy is mounted, and which part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

_ROOT: Final = Path("/")
# v1 writes "no limit" as the greatest whole number of pages.
_NO_LIMIT: Final = 1 << 60


class _Files(NamedTuple):
    """The files of a memory group: what limits it, what it uses, and which of its counts the kernel can take back."""

    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[str, ...]  # of memory.stat


_MEMORY_FILES: Final = (
    # Above memory.high a group is slowed down until it is of no use.
    _Files(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def memory_left(root: Path = _ROOT) -> int | None:
    """Returns the bytes that this process may still take by its groups' limits; None without one. The pages of files
    that a group has read count as left, as in MemAvailable: the kernel takes them back."""
    left = [
        max(0, limit - used) for group in _groups("memory", root) for limit, used in _limits_and_usage(group)
    ]
    return min(left, default=None)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Returns the lowest limit of the groups in bytes; None without one."""
    limits = [limit for group in _groups("memory", root) for limit, _ in _limits_and_usage(group)]
    return min(limits, default=None)


def cpu_quota(root: Path = _ROOT) -> int | None:
    """Returns the cores' worth of time that the groups may use, rounded up; None without a quota."""
    quotas = [cores for group in _groups("cpu", root) if (cores := _cores(group)) is not None]
    return min(quotas, default=None)


def _limits_and_usage(group: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use that cannot be taken back) of the group's limits."""
    for files in _MEMORY_FILES:
        used = _number(group / files.usage)
        if used is None:
            continue
        counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        used = max(0, used - sum(int(counts.get(name, "0")) for name in files.file_pages))
        for name in files.limits:
            limit = _number(group / name)  # "max", which is not a number: none
            if limit is not None and limit < _NO_LIMIT:
                yield limit, used


def _cores(group: Path) -> int | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit()):  # "max", -1, or no such file
        return None
    return math.ceil(int(quota) / int(period))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of our groups with this controller, each before those above it, as far as they are mounted."""
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
    controllers: frozenset[str]  # of v1; the mount's options besides
    part: PurePosixPath  # the group that is seen at `point`
    point: PurePosixPath

    def folders(self, path: str, root: Path) -> Iterator[Path]:
        """A path outside the mounted part (a container that shares its host's namespace) leaves the part's root, which
        is the container's own group then."""
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
    """mountinfo writes blanks in octal."""
    return field.replace("\\040", " ")


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """Returns "" for a file that is not there or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

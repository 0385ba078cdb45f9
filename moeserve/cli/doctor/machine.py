"""Checks the machine except its GPU: cores, memory, limits, the API's port, the disk for downloads.

`root` is the folder that contains proc and sys.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from moeserve.cli.doctor.finding import Finding
from moeserve.cli.running_server import NotOurServer, ServerGone, models_at, url_of
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError, UserError
from moeserve.hub.cache import cache_space
from moeserve.processes.control_groups import cpu_quota
from moeserve.processes.cpus import usable_cores
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.processes.limits import MAX_OPEN_FILES, lockable_bytes, prepare_limits
from moeserve.processes.listeners import listen, listen_at

LEAST_BYTES: Final = GIB  # memory of a server's processes with a small model
SMALL_BYTES: Final = 8 * GIB
SWAPPED_BYTES: Final = GIB
FEW_FILES: Final = 4096
LARGE_DOWNLOAD: Final = 20 * 10**9  # bytes: a model of 30 billion parameters in 4 bits
ROOT: Final = Path("/")

_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/enabled"


def check_cores(root: Path = ROOT) -> Finding:
    count, seen = usable_cores(root), os.cpu_count() or 1
    text = f"{count} physical core{'s' if count > 1 else ''} for this process, of {seen} logical CPUs"
    quota = cpu_quota(root)
    if quota is not None and quota < seen:
        text += f" (a control group allows the time of {quota})"
    if count > 1:
        return Finding("cores", "ok", text)
    return Finding(
        "cores",
        "warning",
        f"{text}: computing and the server's other processes take turns",
        "give the container or the service more (docker --cpus, CPUQuota= of systemd), or taskset fewer limits",
    )


def check_memory() -> Iterator[Finding]:
    """Checks the free memory, by the machine and by the control groups, and reports swapped memory of the machine."""
    free, total = available_bytes(), psutil.virtual_memory().total
    text = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB{limit_note()}"
    remedy = "end other programs, raise the container's or the service's limit (docker --memory, MemoryMax= of systemd)"
    if free < LEAST_BYTES:
        yield Finding("memory", "error", f"{text}: too little for any model", remedy)
    elif free < SMALL_BYTES:
        yield Finding("memory", "warning", f"{text}: enough for small models only", remedy)
    else:
        yield Finding("memory", "ok", text)
    swap = psutil.swap_memory()
    if not swap.total:
        yield Finding("swap", "ok", "none")
    elif swap.used < SWAPPED_BYTES:
        yield Finding("swap", "ok", f"{swap.used / GIB:.1f} of {swap.total / GIB:.1f} GiB used")
    else:
        yield Finding(
            "swap",
            "warning",
            f"{swap.used / GIB:.1f} of {swap.total / GIB:.1f} GiB used: steps wait for the disk where "
            "weights are there",
            "free memory or choose a smaller model; then sudo swapoff -a && sudo swapon -a",
        )


def check_huge_pages(root: Path = ROOT) -> Finding:
    """Returns whether transparent huge pages are on, which the weights ask for; a warning if not. Without them reading
    weights causes TLB misses."""
    subject = "huge pages"
    try:
        chosen = (root / _HUGE_PAGES).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding(
            subject,
            "warning",
            "this kernel has no transparent huge pages: reading weights is slower",
            "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE; a sandbox such as gVisor has none",
        )
    if chosen in ("always", "madvise"):
        return Finding(subject, "ok", f"transparent huge pages: {chosen}")
    return Finding(
        subject,
        "warning",
        f"transparent huge pages: {chosen}: reading weights is slower",
        f"echo madvise | sudo tee /{_HUGE_PAGES}",
    )


def check_limits() -> Iterator[Finding]:
    """Checks the limits of open files, the stack, processes and threads, address space and locked memory, and whether
    the kernel has the calls that a server needs. What a running server takes of them does not count."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    try:
        prepare_limits(beside_others=False)
    except ConfigError as error:
        text, _, remedy = str(error).rpartition(": ")
        yield Finding("limits", "error", text, remedy)
    else:
        raise_it = "ulimit -n, LimitNOFILE= of systemd, nofile of Docker's ulimits"
        if files < FEW_FILES:
            text = f"{files} open files: about as many clients at once, further ones wait"
            yield Finding("open files", "warning", text, raise_it)
        else:
            yield Finding("open files", "ok", f"up to {files}")
    locked = lockable_bytes()
    text = "no limit: RAM slots of experts on disk are locked"
    if locked is not None:
        text = (
            f"{locked / (1 << 20):g} MiB: RAM slots of experts on disk that take more are not locked, and swap may "
            "take them (LimitMEMLOCK= of systemd, memlock of Docker's ulimits); all else does not need it"
        )
    yield Finding("memlock", "ok", text)


def check_port(config: ServerConfig) -> Finding:
    """Checks whether a server could listen on the API's port, or a moeserve server already does."""
    at = f"port {config.port} of {config.host}" if config.uds is None else config.uds
    try:
        if config.uds is None:
            listen(config.host, config.port).close()
        else:
            listen_at(Path(config.uds)).close()
            Path(config.uds).unlink(missing_ok=True)
    except ConfigError as error:
        return _busy_port(config, error)
    return Finding("port", "ok", f"{at} is free")


def _busy_port(config: ServerConfig, error: ConfigError) -> Finding:
    remedy = "choose another, or end the program that listens there (sudo ss -ltnp)"
    if config.uds is None:
        url = url_of(config)
        try:
            served = models_at(url, next(iter(config.api_key), None))
        except (NotOurServer, ServerGone):
            pass
        except UserError as refused:
            return Finding("port", "warning", f"{error}; {refused}", remedy)
        else:
            names = ", ".join(model.name for model in served)
            return Finding("port", "ok", f"a moeserve server answers at {url}: {names}")
    return Finding("port", "error", str(error), remedy)


def check_disk() -> Finding:
    """Checks the disk space for downloads."""
    space = cache_space()
    text = f"{space.free_bytes / 1e9:.1f} GB free for downloads in {space.folder}"
    elsewhere = "put the cache elsewhere: HF_HUB_CACHE"
    if not space.is_writable:
        told = f"{space.folder} may not be written: no model can be downloaded"
        return Finding("disk", "error", told, elsewhere)
    if space.free_bytes < LARGE_DOWNLOAD:
        room = f"make room (moeserve list, moeserve rm), or {elsewhere}"
        return Finding("disk", "warning", f"{text}: less than a model of 30B in 4 bits takes", room)
    return Finding("disk", "ok", text)

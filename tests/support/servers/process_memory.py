"""How much memory all processes of a server take."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.support.servers.server import Server


def memory_of(server: Server) -> int:
    """Bytes of all processes as if nothing else ran: pages that forked processes share count once, and a library's
    pages whole, although other programs on this machine may share them."""
    private = 0
    files: dict[str, int] = {}  # the most that one process has of each
    for process in server.processes():
        private += _anonymous(process)
        for area in process.memory_maps(grouped=True):
            if area.path.startswith("/"):
                files[area.path] = max(files.get(area.path, 0), area.rss - area.anonymous)
    return private + sum(files.values())


def _anonymous(process: psutil.Process) -> int:
    """Bytes of a process's anonymous pages; of a page that n processes share, 1 / n."""
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this kernel does not tell Pss_Anon: it is older than 5.4")


def anonymous_peak(process: psutil.Process) -> int:
    """The most bytes of anonymous pages that a process has had, if its files' pages are those that it has now."""
    sizes = {
        line.partition(":")[0]: int(line.split()[1]) << 10
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.endswith(" kB")
    }
    return sizes["VmHWM"] - sizes["RssFile"] - sizes["RssShmem"]

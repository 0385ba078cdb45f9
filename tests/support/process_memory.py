"""How much memory all processes of a server take."""

from __future__ import annotations

from tests.support.server import Server


def memory_of(server: Server) -> int:
    """Bytes of all processes as if nothing else ran: PSS, but a library's pages count whole although other programs on
    this machine may share them."""
    private = 0
    files: dict[str, int] = {}  # the most that one process has of each
    for process in server.processes():
        for area in process.memory_maps(grouped=True):
            private += area.anonymous
            if area.path.startswith("/"):
                files[area.path] = max(files.get(area.path, 0), area.rss - area.anonymous)
    return private + sum(files.values())

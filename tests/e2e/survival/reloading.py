"""`moeserve reload` of a running server."""

from __future__ import annotations

import subprocess
import sys

from tests.support.servers.server import REPOSITORY, Server, clean_environment


def reload(server: Server) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "launch.py"), "reload", "--pid", str(server.pid)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )

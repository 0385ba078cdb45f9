"""`python -m moeserve.remote`: the link, which a server with --worker runs instead of a worker process."""

from __future__ import annotations

from setproctitle import setproctitle

from moeserve.processes.lifecycle import Process, run_process
from moeserve.remote.link import Link


def main(process: Process) -> None:
    setproctitle("moeserve: link")
    Link(process).run()


if __name__ == "__main__":
    run_process("worker", main)

"""`python -m moeserve.remote.worker`: the worker behind a gate. It is like a local worker, except that no router may
end it."""

from __future__ import annotations

from functools import partial

from moeserve.processes.lifecycle import run_process
from moeserve.worker.__main__ import main

if __name__ == "__main__":
    run_process("worker", partial(main, outlives_routers=True))

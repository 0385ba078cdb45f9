"""Forks stand-ins for router and detokenizer, as the real one does."""

import os
import signal

from moeserve.launcher.zygote.forking import serve_forks
from moeserve.processes.lifecycle import Process, line_to_launcher, run_process
from tests.support.servers.launcher_children.behaviour import main


def fork_stand_ins(process: Process) -> None:
    if os.environ["LAUNCHER_TEST"] == "zygote:killed while starting":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["LAUNCHER_TEST"] == "zygote:stopped while starting":
        os.kill(os.getpid(), signal.SIGSTOP)
    line = line_to_launcher()
    assert line is not None
    serve_forks(process, line, {"router": main, "detokenizer": main})


run_process("zygote", fork_stand_ins)

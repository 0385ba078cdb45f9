"""A command whose standard streams are closed: it goes on, and nothing gets their numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, subprocess, sys
from moeserve.processes.standard_streams import open_closed_streams
open_closed_streams()
print("out", file=sys.stdout, flush=True)
print("err", file=sys.stderr, flush=True)
file = os.open(sys.argv[1], os.O_WRONLY)
child = subprocess.run([sys.executable, "-c", "import sys; print(sys.stdin.read(), file=sys.stderr)"])
os.write(file, f"{file > 2} {child.returncode}".encode())
"""


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)], ids=str)
def test_closed_streams_are_opened(tmp_path: Path, closed: tuple[int, ...]) -> None:
    result = tmp_path / "result"
    result.touch()

    def close() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(result)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=close,
        cwd=REPOSITORY,
        check=True,
    )
    assert done.stdout == ("" if 1 in closed else "out\n")
    assert ("err" in done.stderr) == (2 not in closed)
    assert result.read_text() == "True 0"

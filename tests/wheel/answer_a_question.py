"""`PYTHON answer_a_question.py`: starts the `moeserve` of PYTHON's environment with its demonstration model, and asks
it for a sum.

It needs nothing but the standard library: it runs in environments with an installed wheel and no test tools. Prints the
version and the seconds until the answer. Exit code 0; 1 with the server's log on standard error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

DEADLINE_S = 120.0
QUESTION = {"messages": [{"role": "user", "content": "What is 27 + 15?"}], "temperature": 0}
# Where a compiler or this repository could be found: a wheel needs neither.
LEFT_OUT = ("PATH", "PYTHONPATH", "CC", "CXX")


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            server = subprocess.Popen(
                [str(Path(sys.executable).with_name("moeserve")), "--port", "0", "--device", "cpu"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={name: value for name, value in os.environ.items() if name not in LEFT_OUT},
            )
        try:
            answer = ask(address(server, log, started + DEADLINE_S))
            version = subprocess.run(
                [sys.executable, "-P", "-m", "moeserve", "--version"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout.strip()
        except (OSError, TimeoutError) as error:
            print(log.read_text(errors="replace"), error, sep="\n", file=sys.stderr)
            return 1
        finally:
            seconds = time.monotonic() - started
            server.terminate()
            server.wait(60)
    print(f"{version} on Python {sys.version.split()[0]}: {answer!r} after {seconds:.1f} s")
    return 0 if "42" in answer else 1


def address(server: subprocess.Popen[bytes], log: Path, until: float) -> str:
    """Returns the server's URL when it is ready. Raises TimeoutError after `until` (seconds of time.monotonic()), and
    ChildProcessError when the server has ended."""
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ChildProcessError(f"the server ended with exit code {server.returncode}")
        found = re.search(r"ready.*?(http://[\d.:]+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise TimeoutError(f"the server was not ready within {DEADLINE_S:.0f} s")


def ask(url: str) -> str:
    """Returns the answer's text. Raises OSError when there is none."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(QUESTION).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        content: str = json.load(response)["choices"][0]["message"]["content"]
    return content


if __name__ == "__main__":
    sys.exit(main())

"""The commands of docs/how-to/remote-worker.md make certificates with which a server reaches a worker."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from moeserve.remote.frames import Kind
from tests.support.clients.gate_frames import channel_to, frames_of
from tests.unit.remote.conftest import RunningGate

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "remote-worker.md"


def test_the_certificates_of_the_how_to_work(tmp_path: Path) -> None:
    (commands,) = (
        block
        for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "openssl req" in block
    )
    here = commands.replace("10.0.0.7", "127.0.0.1")
    assert here != commands
    subprocess.run(["bash", "-e"], input=here, text=True, cwd=tmp_path, check=True, capture_output=True)
    gate = RunningGate(tmp_path)
    channel = channel_to(gate, tmp_path)
    assert frames_of(channel)[0][0] is Kind.WELCOME
    assert channel.peer_name == "worker"
    channel.close()
    gate.close()

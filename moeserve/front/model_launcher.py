"""`python -m moeserve.front.model_launcher`: the launcher of one model's server, which the front starts.

It runs an ordinary server (`moeserve.launcher`) that listens on a Unix socket, and ends when the front ends. If the
start fails, it writes the reason to a file for the front.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

import msgspec

from moeserve.config import LAUNCHER_PID_ENV, MODEL_PLACE_ENV, ServerConfig
from moeserve.processes.lifecycle import die_with, end_at_once
from moeserve.processes.logs import set_up_logging
from moeserve.processes.runtime_paths import RuntimePaths

CONFIG_FILE: Final = "config.json"
FAILURE_FILE: Final = "failure"
SOCKET: Final = "api"


def folder_of(directory: Path, place: int) -> Path:
    """Returns the folder of one model's server, within the front's private directory."""
    return directory / f"model-{place}"


class FirstError(logging.Handler):
    """Keeps the first error that is logged: later ones are usually its consequences."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


def main() -> int:
    die_with(int(os.environ.pop(LAUNCHER_PID_ENV)))
    folder = folder_of(RuntimePaths.from_env().directory, int(os.environ.pop(MODEL_PLACE_ENV)))
    os.environ.pop("NOTIFY_SOCKET", None)  # only the front reports to systemd, for the whole server
    config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=ServerConfig)
    set_up_logging("launcher", config.log_level, config.log_format)
    first = FirstError()
    logging.getLogger().addHandler(first)
    from moeserve.launcher.launch import launch

    code = launch(config)
    if code and first.text:
        (folder / FAILURE_FILE).write_text(first.text)
    return code


if __name__ == "__main__":
    end_at_once(main())

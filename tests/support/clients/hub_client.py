"""Processes with the environment that users set, which fetch models from the hub of
tests/support/servers/hub_server.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.servers.hub_server import Hub
from tests.support.servers.server import clean_environment

FETCH = """
import json, sys
from moeserve.config import ServerConfig
from moeserve.errors import UserError
from moeserve.processes.logs import set_up_logging
from moeserve.cli.command_line import resolve
set_up_logging("moeserve", "info")
for model in sys.argv[1:]:
    try:
        config = resolve(ServerConfig(model=model))
        print(json.dumps([config.model, config.served_model_name]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


class Client:
    """Processes that share one cache."""

    def __init__(self, home: Path, hub: Hub) -> None:
        self.cache = home / "hub"
        self.environment = {
            name: value for name, value in clean_environment().items() if not name.startswith("HF_")
        } | {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "PYTHONPATH": os.getcwd()}

    def start(
        self, *models: str, stderr: int = subprocess.PIPE, before: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[str]:
        """`before`: the words of a command that becomes the process by `exec`."""
        return subprocess.Popen(
            [*before, sys.executable, "-c", FETCH, *models],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def ask(self, *models: str, **environment: str) -> list[Any]:
        """For each model, all by one process: [path, the API's name], or the error as a string."""
        process = self.start(*models, stderr=subprocess.PIPE, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def fetch(self, model: str, **environment: str) -> tuple[Path, str]:
        ((path, name),) = self.ask(model, **environment)
        return Path(path), name

    def partial(self) -> list[int]:
        """Sizes of the unfinished files."""
        return [path.stat().st_size for path in self.cache.rglob("*.incomplete")]

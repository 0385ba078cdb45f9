"""`python -m moeserve.cli.models.model_needs RAM GPU [resolve]`: prints the memory that one of several models needs, as
JSON.

The front starts it as a process of its own, because a model's file is not trusted, and reading it takes a second. The
configuration of the model's server comes as JSON on standard input, because it may hold API keys. RAM: the bytes that
all models may take together. GPU: the bytes that they may take on each GPU, separated by commas; "" without GPUs, or
"ask" to ask the driver. resolve: the configuration is completed first, and what that changes is printed too. Nothing is
downloaded for it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from moeserve.cli.command_line import resolve
from moeserve.cli.models.need import gpus_bytes
from moeserve.cli.plan.model_needs import needs_of
from moeserve.config import LAUNCHER_PID_ENV, ServerConfig, to_json_dict
from moeserve.errors import UserError
from moeserve.hub.errors import HubError
from moeserve.models.open import open_model
from moeserve.processes.lifecycle import die_with


def main() -> int:
    ram, gpu, *resolving = sys.argv[1:]
    die_with(int(os.environ[LAUNCHER_PID_ENV]))
    config = given = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    try:
        if resolving:
            config = _completed(given)
        if config.load_format == "auto" and config.worker is None:
            # Finds a truncated file now, before another model is unloaded to make room for it.
            open_model(Path(config.model))
        gpus = gpus_bytes() if gpu == "ask" else [int(size) for size in gpu.split(",") if size]
        answer = {
            "gpus_there": gpus,
            "completed": _changes(given, config),
            **needs_of(config, int(ram), gpus),
        }
    except UserError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def _completed(config: ServerConfig) -> ServerConfig:
    """Raises UserError, whose message is for clients too and names no folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's library is imported
    try:
        return resolve(config)
    except HubError as error:
        raise UserError(f"it has not been downloaded; `moeserve pull {config.model}` downloads it") from error
    except UserError as error:
        raise UserError(re.sub(r"(?<![^\s'\"])/\S*/(?=\S)", "", str(error))) from error


def _changes(before: ServerConfig, after: ServerConfig) -> dict[str, Any]:
    old, new = to_json_dict(before), to_json_dict(after)
    return {name: value for name, value in new.items() if value != old[name]}


if __name__ == "__main__":
    sys.exit(main())

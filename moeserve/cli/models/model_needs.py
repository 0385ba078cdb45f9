"""`python -m moeserve.cli.models.model_needs RAM GPU`: prints what one of several models needs, as JSON.

The front starts it as a process of its own, because a model's file is not trusted, and reading it takes a second. The
configuration of the model's server comes as JSON on standard input, because it may hold API keys. RAM: the bytes that
all models may take together. GPU: the bytes that they may take on each GPU, separated by commas; "" without GPUs, or
"ask" to ask the driver.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec

from moeserve.cli.models.need import gpus_bytes
from moeserve.cli.plan.model_needs import needs_of
from moeserve.config import LAUNCHER_PID_ENV, ServerConfig
from moeserve.errors import UserError
from moeserve.models.open import open_model
from moeserve.processes.lifecycle import die_with


def main() -> int:
    ram, gpu = sys.argv[1:]
    die_with(int(os.environ[LAUNCHER_PID_ENV]))
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    try:
        if config.load_format == "auto" and config.worker is None:
            # Finds a truncated file now, before another model is unloaded to make room for it.
            open_model(Path(config.model))
        gpus = gpus_bytes() if gpu == "ask" else [int(size) for size in gpu.split(",") if size]
        answer = {"gpus_there": gpus, **needs_of(config, int(ram), gpus)}
    except UserError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())

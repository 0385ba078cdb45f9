"""Finds a model's memory needs in a separate process (`moeserve.cli.models.model_needs`), because the front parses no
untrusted model files itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import Any, Final

import msgspec

from moeserve.config import LAUNCHER_PID_ENV, ServerConfig, to_json_dict
from moeserve.front.memory import Memory
from moeserve.front.pooled_model import LoadFailed, Needs
from moeserve.processes.lifecycle import python_environment

MODULE: Final = "moeserve.cli.models.model_needs"
DEADLINE_S: Final = 120.0  # enough for a cold disk, and for importing torch on a machine with a GPU
KILLED_S: Final = 5.0  # for the process to end when it is killed
MAX_ANSWER_BYTES: Final = 64 << 10
RESOLVE: Final = "resolve"


class NeedsReader:
    """Reads the needs of one front's models. The first answer also says how much GPU memory is free before any load."""

    def __init__(self, ram: int) -> None:
        """ram: bytes that all models together may take; may be set again before the first read."""
        self.gpus: list[int] | None = None  # bytes of each; None until the first answer
        self.ram = ram

    async def read(self, config: ServerConfig, *, is_resolved: bool = True) -> Needs:
        """Returns the needs of the model with this configuration of its own server, which is completed if it is not
        `is_resolved`. Raises LoadFailed."""
        gpu = "ask" if self.gpus is None else ",".join(map(str, self.gpus))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", MODULE, str(self.ram), gpu),
                *([] if is_resolved else [RESOLVE]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=python_environment() | {LAUNCHER_PID_ENV: str(os.getpid())},
                cwd="/",  # all paths of the configuration are absolute
            )
        except OSError as error:  # no memory, process or descriptor is left
            raise LoadFailed(f"no process could be started that reads its file: {error}") from error
        try:
            async with asyncio.timeout(DEADLINE_S):
                said, _ = await process.communicate(msgspec.json.encode(to_json_dict(config)))
        except TimeoutError:
            raise LoadFailed(
                f"its file was not read within {DEADLINE_S:g} s; check the disk or network file system "
                "that it is on"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                with suppress(TimeoutError):  # it may wait for a file system that hangs
                    await asyncio.wait_for(process.wait(), KILLED_S)
        if process.returncode != 0 or len(said) > MAX_ANSWER_BYTES:
            raise LoadFailed("its file cannot be read; the lines above say why")
        try:
            # A library may have written lines before the answer.
            answer = json.loads(said.splitlines()[-1])
        except (ValueError, IndexError):
            raise LoadFailed(
                "its file cannot be read: the process that reads it gave no answer; the log above says why"
            ) from None
        return self._taken(answer)

    def _taken(self, answer: dict[str, Any]) -> Needs:
        if self.gpus is None:
            self.gpus = answer.get("gpus_there")
        if "error" in answer:
            raise LoadFailed(answer["error"])
        return Needs(
            Memory(answer["ram"]),
            tuple(answer["gpus"]),
            tuple(answer["gpu_choices"]),
            answer["max_model_len"],
            answer["overrides"],
            answer["facts"],
            tuple(self.gpus or ()),
            answer["completed"],
        )

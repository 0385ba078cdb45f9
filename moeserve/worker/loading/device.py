"""Chooses the device that the model runs on."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Final, NamedTuple

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError

MAX_GPUS = 64
MIN_CAPABILITY = (8, 0)  # bfloat16 tensor cores

log = logging.getLogger(__name__)


def choose_device(wanted: str) -> str:
    """Returns "cpu" or "cuda" for --device. Raises ConfigError if a GPU is requested but unusable; "auto" then
    chooses the CPU, and logs the reason if there is a GPU."""
    if wanted == "cpu":
        return "cpu"
    obstacle = gpu_obstacle()
    if obstacle is None:
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(f"--device cuda: {obstacle.text}; or run on the CPU with --device cpu")
    if obstacle.is_of_gpu:
        log.warning("the GPU is not used: %s", obstacle.text)
    return "cpu"


_IN_FORK: Final = {"cpu": 10, "cuda": 11}  # exit codes


def choose_in_fork(wanted: str) -> str:
    """Runs `choose_device` in a forked child, because this process must not initialise the GPU driver before it forks
    workers. If the choice fails, returns "cuda"; the forked worker then raises the error."""
    if wanted != "auto":
        return wanted
    import torch

    if torch.version.cuda is None:  # torch without CUDA: nothing to initialise
        return choose_device(wanted)
    pid = os.fork()
    if pid == 0:
        code = _IN_FORK["cuda"]
        try:
            code = _IN_FORK[choose_device(wanted)]
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "cpu" if status == _IN_FORK["cpu"] else "cuda"


def is_divided(config: ServerConfig) -> bool:
    """Returns whether several GPUs are requested, which need one process each. Raises ConfigError as `parse_gpus`
    does."""
    return config.device != "cpu" and len(parse_gpus(config.gpus)) > 1


def gpu_numbers(config: ServerConfig) -> list[int]:
    """Returns the GPU numbers of --gpus, in order. Raises ConfigError for a missing GPU, and for --parallel without
    several GPUs."""
    numbers = parse_gpus(config.gpus)
    import torch

    here = torch.cuda.device_count()
    if max(numbers) >= here:
        raise ConfigError(
            f"--gpus {config.gpus}: this machine has {here} GPUs, numbered from 0; choose among them"
        )
    if len(numbers) == 1 and config.parallel != "auto":
        raise ConfigError(
            f"--parallel {config.parallel}: has no effect with one GPU; leave it out, or say --gpus 2"
        )
    return numbers


def parse_gpus(text: str) -> list[int]:
    """Returns the GPU numbers that --gpus names: the first N for a count N, else the comma-separated numbers. Raises
    ConfigError for a text of another form, too many GPUs, or one that is named twice."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"--gpus: must be a count of GPUs (2), or GPU numbers separated by commas (0,2), not {text!r}"
        )
    numbers = [int(part) for part in parts]
    if len(parts) == 1:
        numbers = list(range(numbers[0]))
    if not 1 <= len(numbers) <= MAX_GPUS or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--gpus: must name 1 to {MAX_GPUS} GPUs, each once, not {text!r}")
    return numbers


class Obstacle(NamedTuple):
    text: str  # reason why the first GPU is unusable, with the remedy
    is_of_gpu: bool  # False: there is no GPU


def gpu_obstacle() -> Obstacle | None:
    """Returns why the first GPU cannot be used; None if it can."""
    import torch  # imported late: planning for a machine without torch uses "cpu"

    if torch.version.cuda is None:
        text = "this PyTorch was built without CUDA: install one with it, see https://pytorch.org/get-started/locally"
        return Obstacle(text, is_of_gpu=False)
    if not torch.cuda.is_available():
        text = (
            f"no usable GPU: PyTorch is built for CUDA {torch.version.cuda}, and there is no NVIDIA GPU here or its "
            "driver is older than that (nvidia-smi shows both)"
        )
        return Obstacle(text, is_of_gpu=False)
    capability = torch.cuda.get_device_capability(0)
    if capability < MIN_CAPABILITY:
        text = (
            f"{torch.cuda.get_device_name(0)} has compute capability {capability[0]}.{capability[1]}, "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more is needed (Ampere, 2020, and later)"
        )
        return Obstacle(text, is_of_gpu=True)
    if importlib.util.find_spec("triton") is None:
        return Obstacle("the package triton is missing: pip install triton", is_of_gpu=True)
    return None

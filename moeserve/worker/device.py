"""Which device the model runs on."""

from __future__ import annotations

import importlib.util
import logging

from moeserve.errors import ConfigError

MIN_CAPABILITY = (8, 0)  # bfloat16 on the tensor cores

log = logging.getLogger(__name__)


def choose_device(wanted: str) -> str:
    """Gives "cpu" or "cuda". `wanted` is --device. Raises ConfigError where a GPU is asked for that cannot be used;
    "auto" then takes the CPU, and logs why where there is a GPU at all."""
    if wanted == "cpu":
        return "cpu"
    obstacle = _obstacle()
    if obstacle is None:
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(f"--device cuda: {obstacle}; or run on the CPU with --device cpu")
    import torch

    if torch.cuda.is_available():
        log.warning("the GPU is not used: %s", obstacle)
    return "cpu"


def _obstacle() -> str | None:
    """Why the first GPU cannot be used, with the remedy; None where it can."""
    import torch  # here, for "cpu" needs none: the plan for a machine without it

    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA: install one with it, see https://pytorch.org/get-started/locally"
    if not torch.cuda.is_available():
        return (
            f"no usable GPU: PyTorch is built for CUDA {torch.version.cuda}, and there is no NVIDIA GPU here or its "
            "driver is older than that (nvidia-smi shows both)"
        )
    capability = torch.cuda.get_device_capability(0)
    if capability < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(0)} has compute capability {capability[0]}.{capability[1]}, "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more is needed (Ampere, 2020, and later)"
        )
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing: pip install triton"
    return None

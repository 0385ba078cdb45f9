"""An option: a field of a dataclass that knows its help text, its group in `--help` and its range."""

from __future__ import annotations

from dataclasses import field
from typing import Any

ENV_PREFIX = "MOESERVE_"
# What a server's processes tell each other by; no option.
LISTENERS_ENV = ENV_PREFIX + "LISTENERS"  # descriptors, comma separated: for a process that inherits them
HEALTH_LISTENER_ENV = ENV_PREFIX + "HEALTH_LISTENER"  # one descriptor
LAUNCHER_PID_ENV = ENV_PREFIX + "LAUNCHER_PID"
ADAPTERS_FILE = "adapters.json"  # in the runtime directory
ADAPTERS_FILE_ENV = ENV_PREFIX + "ADAPTERS_FILE"  # in an upgrade: the path of the first server's
MODEL_PLACE_ENV = ENV_PREFIX + "MODEL_PLACE"  # of several models: the place in the list, for its launcher
LOGGED_MODEL_ENV = ENV_PREFIX + "LOGGED_MODEL"  # of several models: the name that log lines have
FRONT_SECRET_ENV = ENV_PREFIX + "FRONT_SECRET"  # of several models: by which a model's server knows its front
PROCESS_VARIABLES = frozenset(
    {
        LISTENERS_ENV,
        HEALTH_LISTENER_ENV,
        LAUNCHER_PID_ENV,
        ADAPTERS_FILE_ENV,
        MODEL_PLACE_ENV,
        LOGGED_MODEL_ENV,
        FRONT_SECRET_ENV,
    }
)
GROUPS = (
    *("Model", "Several models", "Network", "Chat", "Batches"),
    *("Capacity", "Device", "CPU engine", "GPU", "Server"),
)


def option(
    default: Any,
    group: str,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    several: bool = False,
) -> Any:
    """Returns a dataclass field of the configuration with its default, help, group, and range low to high (inclusive).
    several: the flag takes any number of values at once. Raises ValueError for a group that no page lists."""
    if group not in GROUPS:
        raise ValueError(f"there is no group of flags {group!r}")
    metadata = {
        "group": group,
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "metavar": metavar,
        "several": several,
    }
    return field(default=default, metadata=metadata)


def env_name(field_name: str) -> str:
    return ENV_PREFIX + field_name.upper()

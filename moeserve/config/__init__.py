"""ServerConfig: the only source of flags, environment names and defaults.

Each field carries its help text, its group in `--help`, its range and its parser. The flag is the field's
name with dashes, the environment variable `MOESERVE_` and the name in capitals; a flag wins over the
environment, which wins over the default. A configuration never changes: facts that the worker finds out later (how many
KV slots fit) are in a message (`WorkerReady`).
"""

from .as_json import to_json_dict
from .option import (
    ADAPTERS_FILE,
    ADAPTERS_FILE_ENV,
    ENV_PREFIX,
    FRONT_SECRET_ENV,
    GROUPS,
    HEALTH_LISTENER_ENV,
    LAUNCHER_PID_ENV,
    LISTENERS_ENV,
    LOGGED_MODEL_ENV,
    MODEL_PLACE_ENV,
    PROCESS_VARIABLES,
    env_name,
)
from .server_config import ServerConfig
from .speculative import DraftMethod, Drafts, Lookup, drafts_of, num_drafts, with_draft_model

__all__ = [
    "ADAPTERS_FILE",
    "ADAPTERS_FILE_ENV",
    "ENV_PREFIX",
    "FRONT_SECRET_ENV",
    "GROUPS",
    "HEALTH_LISTENER_ENV",
    "LAUNCHER_PID_ENV",
    "LISTENERS_ENV",
    "LOGGED_MODEL_ENV",
    "MODEL_PLACE_ENV",
    "PROCESS_VARIABLES",
    "DraftMethod",
    "Drafts",
    "Lookup",
    "ServerConfig",
    "drafts_of",
    "env_name",
    "num_drafts",
    "to_json_dict",
    "with_draft_model",
]

"""A configuration as JSON, in which the launcher hands it to the processes."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeserve.config.server_config import ServerConfig


def to_json_dict(config: ServerConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)

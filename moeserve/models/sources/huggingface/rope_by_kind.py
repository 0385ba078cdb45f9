"""RoPE's settings of families whose layers with and without a window rotate differently: `rope_parameters` has an
object for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.models.errors import SettingError
from moeserve.models.sources.gguf.metadata import MetadataValue

from .layer_settings import FULL, SLIDING

Settings = Mapping[str, Any]


def rope_by_kind(path: Path, config: Settings) -> tuple[Settings, Settings]:
    """Returns the settings of layers without a window, and of layers with a window; a kind's settings are empty if
    config.json has none. Raises ModelError for a missing or unsupported setting."""
    given = config.get("rope_parameters")
    kinds = [given.get(kind) or {} for kind in (FULL, SLIDING)] if isinstance(given, dict) else []
    if not kinds or not all(isinstance(kind, dict) for kind in kinds) or not kinds[0]:
        raise SettingError(
            path,
            f"'rope_parameters' is {given!r:.80}; an object for each of {FULL} and {SLIDING} is expected",
        )
    return kinds[0], kinds[1]


def no_rope(path: Path, config: Settings) -> dict[str, MetadataValue]:
    """Returns no keys, whatever config.json says about RoPE: for models without positions in attention."""
    del path, config
    return {}


def check_unscaled(path: Path, settings: Settings, kind: str) -> None:
    """Raises ModelError if RoPE of this kind of layer is scaled."""
    found = settings.get("rope_type", settings.get("type", "default"))
    if found != "default":
        raise SettingError(path, f"rope_type of {kind} is {found!r:.40}; only 'default' is supported")

"""The models of a server and their common options: written by the command line, read by the front's processes."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from moeserve.config import ServerConfig, to_json_dict
from moeserve.errors import ConfigError

MODELS_FILE: Final = "models.json"  # in the runtime directory; mode 0600, for it may hold API keys
MAX_MODELS: Final = 64
# The options of folders that servers cannot share: each model gets a folder of its own within.
FOLDERS: Final = ("kv_disk", "data_dir")


@dataclass(frozen=True)
class ServedModel:
    # The configuration of the model's own server, without the front's network options.
    config: ServerConfig
    is_pinned: bool = False  # loaded at the start, and never unloaded for another
    is_downloaded: bool = False  # by a client of the server; clients may also delete it
    # False: some of its files were not there at the start. The configuration is completed before the first load.
    is_resolved: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names that requests may always use: the model's name, its aliases and its adapters' names."""
        assert self.config.served_model_name is not None, "the command line has chosen it"
        return (*self.config.served_model_name.split(","), *self.adapters)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Returns the names of the adapters that the model is loaded with."""
        return tuple(pair.partition("=")[0] for pair in self.config.lora_modules)

    @property
    def folders(self) -> frozenset[str]:
        """Returns the folders that no other server may use at the same time."""
        named = (getattr(self.config, option) for option in FOLDERS)
        return frozenset(folder for folder in named if folder)

    def resolved(self, completed: dict[str, Any]) -> ServedModel:
        """Returns the model with its complete configuration. completed: the options that change, as JSON has them."""
        config = msgspec.convert(to_json_dict(self.config) | completed, ServerConfig)
        return dataclasses.replace(self, config=config, is_resolved=True)


@dataclass(frozen=True)
class FrontConfig:
    common: ServerConfig  # the front's network options, and the options common to all models
    models: tuple[ServedModel, ...]  # the first is the default
    # The configuration of models that are added later: resolved, but without the model.
    template: ServerConfig

    def write(self, directory: Path) -> None:
        models = [
            {
                "config": to_json_dict(model.config),
                "is_pinned": model.is_pinned,
                "is_resolved": model.is_resolved,
            }
            for model in self.models
        ]
        named = {"common": to_json_dict(self.common), "template": to_json_dict(self.template)}
        encoded = msgspec.json.encode(named | {"models": models})
        descriptor = os.open(directory / MODELS_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encoded)

    @classmethod
    def read(cls, directory: Path) -> FrontConfig:
        """Reads the front's configuration. Raises ConfigError."""
        path = directory / MODELS_FILE
        try:
            found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
            common = msgspec.convert(found["common"], ServerConfig)
            template = msgspec.convert(found["template"], ServerConfig)
            models = [
                ServedModel(
                    msgspec.convert(model["config"], ServerConfig),
                    model["is_pinned"],
                    is_resolved=model["is_resolved"],
                )
                for model in found["models"]
            ]
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return cls(common, tuple(models), template)

    def downloaded(self, name: str, path: str) -> ServedModel:
        """Returns a model that a client has downloaded, with the options common to all models."""
        config = dataclasses.replace(self.template, model=path, served_model_name=name)
        return ServedModel(with_own_folders(config, FOLDERS), is_downloaded=True)


def with_own_folders(config: ServerConfig, names: Iterable[str]) -> ServerConfig:
    """Returns the configuration with a folder for its model within each of these common folders."""
    own = (config.served_model_name or "model").split(",")[0]
    inner = re.sub(r"[^A-Za-z0-9._-]", "_", own).lstrip(".")
    common = {name: getattr(config, name) for name in names}
    changed: dict[str, Any] = {
        name: str(Path(path) / inner) for name, path in common.items() if path is not None
    }
    return dataclasses.replace(config, **changed)

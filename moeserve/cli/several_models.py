"""`moeserve serve A B C` and --models-file: the models of one server, each with its own options."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moeserve.cli.command_line import (
    demonstration_model,
    flag_name,
    read_options,
    resolve,
    resolve_later,
)
from moeserve.cli.unicode_values import check_unicode
from moeserve.config import ServerConfig, env_name
from moeserve.errors import ConfigError, FileError, UserError
from moeserve.front.config import FOLDERS, MAX_MODELS, FrontConfig, ServedModel, with_own_folders

Given = Mapping[str, str | list[str] | None]  # texts of flags by field name; None or absent: not given

MAX_FILE_BYTES: Final = 1 << 20
PIN: Final = "pin"

# Options of the whole server, which a model cannot override.
OF_FRONT: Final = frozenset(
    {
        *("host", "allowed_host", "allowed_origin", "port", "uds", "health_port"),
        *("ssl_certfile", "ssl_keyfile", "api_key", "api_key_file"),
        *("max_requests_per_key", "max_idle_connections_per_address", "drain_delay"),
        *("models_file", "models_memory", "model_idle_timeout", "model_load_timeout"),
        *("log_level", "log_format", "pull", "mcp_servers", "mcp_headers_file"),
        *("batch_dir", "batch_dir_gib"),
    }
)
# Options that only make sense for one model: its files, names and sockets.
OF_ONE_MODEL: Final = frozenset(
    {
        *("model", "served_model_name", "mmproj", "lora_modules", "chat_template"),
        *("expert_heat", "placement_rules", "debug_dump", "debug_dump_steps"),
        *("record_routing_trace", "record_routing_tokens"),
        *("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic"),
        *("worker", "worker_ssl_certfile", "worker_ssl_keyfile", "worker_ssl_ca_certs"),
    }
)
# Options that a server with one model cannot use.
FOR_SEVERAL: Final = ("models_memory", "model_idle_timeout", "model_load_timeout")

log = logging.getLogger(__name__)


def check_single(config: ServerConfig) -> None:
    """Raises ConfigError for an option that needs several models."""
    for name in FOR_SEVERAL:
        if getattr(config, name) is not None:
            raise ConfigError(f"{flag_name(name)}: is for several models; name them, or use --models-file")


def wants_several(named: Sequence[str], given: Given, environment: Mapping[str, str]) -> bool:
    in_environment = environment.get(env_name("models_file"))
    return len(named) > 1 or bool(given.get("models_file") or in_environment)


def several_models(named: Sequence[str], given: Given, environment: Mapping[str, str]) -> FrontConfig:
    """Returns the configuration of a server with several models. `named`: the models of the command line. Models whose
    files are not all there are included, and the log says what is missing. Raises ConfigError, and a UserError if no
    model has its files."""
    if given.get("model") is not None:
        raise ConfigError("--model names one model; name several before the flags, or in --models-file")
    common = read_options({**given, "model": None}, _without(environment, OF_ONE_MODEL))
    _check_common(common)
    entries: list[dict[str, Any]] = [{"model": name} for name in named]
    if common.models_file is not None:
        entries += _entries_of(Path(common.models_file).expanduser())
    if len(entries) > MAX_MODELS:
        raise ConfigError(f"{len(entries)} models are named; at most {MAX_MODELS} are allowed")
    problems: list[UserError] = []
    models = tuple(
        _served(place, entry, given, environment, common, problems) for place, entry in enumerate(entries, 1)
    )
    if len(problems) == len(models):
        raise problems[0]
    for problem in problems:
        log.error("%s; the other models are served, and this one when its files are there", problem)
    counts = Counter(name for model in models for name in model.names)
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"{count} models are called {name}: give each a different served-model-name in --models-file"
            )
    return FrontConfig(resolved_front(common), models, _template(common))


def resolved_front(common: ServerConfig) -> ServerConfig:
    """Returns the options for the front process, which serves no model itself, with absolute paths."""
    return dataclasses.replace(
        common,
        api_key_file=_absolute(common.api_key_file),
        mcp_headers_file=_absolute(common.mcp_headers_file),
        uds=_absolute(common.uds),
        batch_dir=_absolute(common.batch_dir),
        ssl_certfile=_absolute(common.ssl_certfile),
        ssl_keyfile=_absolute(common.ssl_keyfile),
    )


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).expanduser().absolute())


def _without(environment: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    left_out = {env_name(name) for name in names}
    return {name: text for name, text in environment.items() if name not in left_out}


def _check_common(common: ServerConfig) -> None:
    defaults = ServerConfig()
    for name in sorted(OF_ONE_MODEL):
        if getattr(common, name) == getattr(defaults, name):
            continue
        raise ConfigError(f"{flag_name(name)}: is for one model; write it under that model in --models-file")


def _entries_of(path: Path) -> list[dict[str, Any]]:
    """Reads the list in the file and checks its form."""
    from moeserve.placement.strict_yaml import read_yaml  # imports yaml, which other commands do not need

    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"--models-file: {path} has more than {MAX_FILE_BYTES >> 10} KiB")
        found = read_yaml(text)
    except OSError as error:
        raise ConfigError(
            f"--models-file: {path} cannot be read: {error}; correct the path or its rights"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--models-file: {path} cannot be read: {error}; correct the file") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(
            f"--models-file: {path} must be a list with a mapping for each model, which has the key model"
        )
    for place, entry in enumerate(found, 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
            raise ConfigError(
                f"--models-file: model {place} of {path} must be a mapping with the key model, a path or name"
            )
    return [{str(key): value for key, value in entry.items()} for entry in found]


def _served(
    place: int,
    entry: dict[str, Any],
    given: Given,
    environment: Mapping[str, str],
    common: ServerConfig,
    problems: list[UserError],
) -> ServedModel:
    """Returns one model's server: the common options, overridden by the model's own. If a file of the model is missing
    or cannot be used, adds the error to `problems`. Raises ConfigError."""
    own = dict(entry)
    is_pinned = own.pop(PIN, False)
    try:
        if not isinstance(is_pinned, bool):
            raise ConfigError(f"{PIN}: must be true or false, not {is_pinned!r}")
        texts = dict(_text_of(key, value) for key, value in own.items())
        asked = read_options({**given, **texts}, _without(environment, OF_ONE_MODEL))
        try:
            config, is_resolved = resolve(asked), True
        except UserError as error:
            if isinstance(error, ConfigError) and not isinstance(error, FileError):
                raise
            config, is_resolved = resolve_later(asked), False
            problems.append(type(error)(f"model {place} ({entry['model']}): {error}"))
        check_unicode(config)
    except ConfigError as error:
        raise ConfigError(f"model {place} ({entry['model']}): {error}") from error
    config = with_own_folders(config, [name for name in FOLDERS if name not in texts])
    return ServedModel(_without_front(config, common), is_pinned, is_resolved=is_resolved)


def _template(common: ServerConfig) -> ServerConfig:
    """Returns the configuration that every model's server has, without a model."""
    some = resolve(dataclasses.replace(common, model=str(demonstration_model())))
    return dataclasses.replace(_without_front(some, common), model="", served_model_name=None)


def _without_front(config: ServerConfig, common: ServerConfig) -> ServerConfig:
    """Returns a model's configuration without the options of the server as a whole."""
    defaults = ServerConfig()
    plain = {name: getattr(defaults, name) for name in OF_FRONT - {"api_key", "api_key_file"}}
    plain |= {"host": common.host, "log_level": common.log_level, "log_format": common.log_format}
    return dataclasses.replace(config, **plain)


def _text_of(key: str, value: Any) -> tuple[str, str | list[str]]:
    """Returns an option of the file as a flag's text. Raises ConfigError."""
    name = key.replace("-", "_")
    options = {option.name: option for option in dataclasses.fields(ServerConfig)}
    if name not in options:
        raise ConfigError(f"{key}: there is no such option; flags stand without their dashes")
    if name in OF_FRONT:
        raise ConfigError(f"{key}: is for the whole server; give {flag_name(name)} on the command line")
    if isinstance(options[name].default, tuple):
        return name, [_scalar(key, one) for one in (value if isinstance(value, list) else [value])]
    return name, _scalar(key, value)


def _scalar(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{key}: must be a text or a number, not {value!r}")
    return str(value)

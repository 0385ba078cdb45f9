"""Turns flags and environment variables into a ServerConfig, and computes the defaults that depend on the machine.

Names, ranges and help texts come from ServerConfig's fields; nothing is repeated here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import os
import re
import types
import typing
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from moeserve import __version__
from moeserve.cli import model_hints
from moeserve.config import (
    ENV_PREFIX,
    GROUPS,
    PROCESS_VARIABLES,
    Drafts,
    ServerConfig,
    drafts_of,
    env_name,
    with_draft_model,
)
from moeserve.errors import ConfigError, FileError
from moeserve.hub import name_of
from moeserve.models.adapters.modules import parse_modules, resolve_directory, resolve_modules
from moeserve.models.sources.first_bytes import what_instead_of_gguf
from moeserve.models.sources.model_files import is_tower_file, listed, models_of
from moeserve.processes.cpus import pool_threads
from moeserve.processes.tracing import traces_url

DEMONSTRATION_MODEL = "moeserve-demo-q8_0.gguf"
MODEL_SOURCE = "--model or MOESERVE_MODEL"
DRAFT_MODEL_SOURCE = "--speculative-model"


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def options_parser(prog: str, epilog: str = "") -> argparse.ArgumentParser:
    """Returns a parser for all options of the server. `epilog`: printed at the end of `--help`, before the order of
    precedence."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [command] [MODEL ...] [options]",
        description="Serve a mixture-of-experts model over an OpenAI-compatible HTTP API.",
        epilog=f"{epilog}A flag overrides its environment variable, which overrides the default.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"moeserve {__version__}")
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option of ServerConfig as a flag, in its group of `--help`."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for option in dataclasses.fields(ServerConfig):
        _add(groups[option.metadata["group"]], option, help_of(option))


def add_shared_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, names: Collection[str], **texts: str
) -> None:
    """Adds options of the server, with the same meaning, to another command's parser and `--help`. `names`: the
    options. `texts`: other help texts, by name, for options whose default differs there."""
    options = {option.name: option for option in dataclasses.fields(ServerConfig)}
    for name in names:
        _add(parser, options[name], texts.get(name) or help_of(options[name]))


def _add(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, option: dataclasses.Field[Any], text: str
) -> None:
    # Kept as text, and parsed in `_read`, so that flags and environment variables give the same errors.
    several = option.metadata["several"]
    parser.add_argument(
        flag_name(option.name),
        action="extend" if several else "append" if _is_repeatable(option) else "store",
        nargs="+" if several else None,
        default=None,
        metavar=value_name(option),
        help=text,
    )


def read_options(given: Mapping[str, str | list[str] | None], environment: Mapping[str, str]) -> ServerConfig:
    """Returns the configuration. given: texts of flags, by field name; None: not given. environment: an empty variable
    counts as unset. Raises ConfigError for a value that is no number, out of range, or none of the choices."""
    values: dict[str, Any] = {}
    for option in dataclasses.fields(ServerConfig):
        text: str | list[str] | None = given.get(option.name)
        source = flag_name(option.name)
        if text is None:
            text = environment.get(env_name(option.name)) or None
            source = f"environment variable {env_name(option.name)}"
            if text is not None and _is_repeatable(option):
                text = text.split(",")
        if isinstance(text, list):
            values[option.name] = tuple(_read(option, one, source) for one in text)
        elif text is not None:
            values[option.name] = _read(option, text, source)
    return ServerConfig(**values)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the variables that have the prefix of options but are none: typing errors, or variables that Kubernetes
    sets for a service called moeserve."""
    ours = {env_name(option.name) for option in dataclasses.fields(ServerConfig)} | PROCESS_VARIABLES
    return sorted(name for name in environment if name.startswith(ENV_PREFIX) and name not in ours)


# The unit named in an error about a number, by the option's placeholder in `--help`: users write 16GB or 5m.
_UNITS: Final = {
    "GIB": " of GiB without a unit",
    "MS": " of milliseconds without a unit",
    "SECONDS": " of seconds without a unit",
    "SHARE": " such as 0.5",
}


def _read(option: dataclasses.Field[Any], text: str, source: str) -> int | float | str:
    """Parses one value, and checks the option's type, range and choices; a number may have words as choices, too."""
    kind, meta = _kind(option), option.metadata
    if not text:
        raise ConfigError(f"{source}: must not be empty")
    if kind is not str and text in meta["choices"]:
        return text
    if kind is str:
        if meta["choices"] and text not in meta["choices"]:
            raise ConfigError(f"{source}: must be one of {', '.join(meta['choices'])}, not {text!r}")
        return text
    try:
        value: int | float = kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        unit = _UNITS.get(meta["metavar"] or value_name(option), "")
        words = "".join(f" or {word}" for word in meta["choices"])
        raise ConfigError(f"{source}: must be {noun}{unit}{words}, not {text!r}") from None
    if not meta["low"] <= value <= meta["high"]:  # false for NaN, too
        raise ConfigError(f"{source}: must be between {meta['low']} and {meta['high']}, not {text}")
    return value


def _kind(option: dataclasses.Field[Any]) -> type:
    """Returns the type of the option's value; int for `int | None` and for `tuple[int, ...]`, float for `float |
    Literal["auto"] | None`."""
    hint = _hints()[option.name]
    if _is_repeatable(option):
        return typing.cast(type, typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # the latter with a Literal
        (hint,) = (
            part for part in typing.get_args(hint) if isinstance(part, type) and part is not types.NoneType
        )
    return typing.cast(type, hint)


@cache  # evaluates all annotations; called for each option
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(ServerConfig)


def _is_repeatable(option: dataclasses.Field[Any]) -> bool:
    return isinstance(option.default, tuple)


def value_name(option: dataclasses.Field[Any]) -> str:
    """Returns the placeholder of the option's value in `--help`."""
    kind, words = _kind(option), option.metadata["choices"]
    name = option.metadata["metavar"] or {int: "N", float: "SECONDS", str: "TEXT"}[kind]
    if words:
        return "{" + ",".join(words if kind is str else (name, *words)) + "}"
    return str(name)


def help_of(option: dataclasses.Field[Any], text: str = "") -> str:
    """Returns the help of a flag, with its default and its environment variable. text: replaces the option's own
    words."""
    default = f"default: {option.default}, " if option.default not in (None, "", ()) else ""
    return f"{text or option.metadata['help']} [{default}{env_name(option.name)}]".replace("%", "%%")


# ---------------------------------------------------------------- defaults that need the machine


def _drafts_of(config: ServerConfig) -> Drafts | None:
    try:
        return drafts_of(config)
    except ValueError as error:
        raise ConfigError(f"--speculative-config: {error}") from error


def _with_draft_model(config: ServerConfig) -> ServerConfig:
    """Finds the small model that drafts, if one is named. Raises ConfigError, also for other errors in the options of
    drafts."""
    drafts = _drafts_of(config)
    if drafts is None or drafts.model is None:
        return config
    path, _ = _find(drafts.model, DRAFT_MODEL_SOURCE)
    return with_draft_model(config, str(path))


def resolve(config: ServerConfig) -> ServerConfig:
    """Returns the configuration with the values that depend on the file system and the CPU filled in: absolute paths,
    the model's name in the API, the number of threads, the traces' whole URL. Downloads a model that is named but not
    here. Raises ConfigError, or another UserError if the model cannot be downloaded."""
    config = _with_draft_model(_without_files(config))
    model, api_name = _find(config.model) if config.model else _local(demonstration_model())
    names = config.served_model_name or api_name
    return dataclasses.replace(
        config,
        model=str(model),
        mmproj=find_tower(config.mmproj, model),
        served_model_name=names,
        lora_modules=resolve_modules(config.lora_modules, names.split(",")),
        lora_dir=resolve_directory(
            config.lora_dir, len(config.lora_modules), config.max_loras, config.lora_memory
        ),
    )


def resolve_later(config: ServerConfig) -> ServerConfig:
    """Returns the configuration of a model whose files are not all there: as `resolve` does, but looks at none of the
    model's files. `resolve` completes it, in any working directory. Raises ConfigError for flags that contradict each
    other."""
    config = _without_files(config)
    drafts = _drafts_of(config)
    if drafts is not None and drafts.model is not None:
        config = with_draft_model(config, _place_of(drafts.model))
    model = _place_of(config.model)
    modules = parse_modules(config.lora_modules)
    return dataclasses.replace(
        config,
        model=model,
        mmproj=config.mmproj if config.mmproj == "auto" else _absolute(config.mmproj),
        served_model_name=config.served_model_name
        or (_name_of(Path(model)) if os.path.isabs(model) else model),
        lora_modules=tuple(f"{name}={_absolute(path)}" for name, path in modules.items()),
        lora_dir=_absolute(config.lora_dir),
    )


def _place_of(model: str) -> str:
    """Returns an absolute path; the name where it is one of the hub and not of a file here."""
    path = Path(model).expanduser()
    if os.path.exists(path) or (name := name_of(model)) is None:
        return os.path.abspath(path)
    return str(name)


def _without_files(config: ServerConfig) -> ServerConfig:
    """Returns `config` with the values filled in that depend on no file of the model. Raises ConfigError."""
    _check_image_tokens(config)
    return dataclasses.replace(
        config,
        api_key_file=_absolute(config.api_key_file),
        mcp_headers_file=_absolute(config.mcp_headers_file),
        prefix_cache=_prefix_cache(config),
        chat_template=_absolute(config.chat_template),
        uds=_absolute(config.uds),
        ssl_certfile=_absolute(config.ssl_certfile),
        ssl_keyfile=_absolute(config.ssl_keyfile),
        worker_ssl_certfile=_absolute(config.worker_ssl_certfile),
        worker_ssl_keyfile=_absolute(config.worker_ssl_keyfile),
        worker_ssl_ca_certs=_absolute(config.worker_ssl_ca_certs),
        threads=config.threads or pool_threads(config.device),
        otlp_endpoint=traces_url(config.otlp_endpoint, os.environ),
        data_dir=_absolute(config.data_dir),
        batch_dir=_absolute(config.batch_dir),
        kv_disk=_absolute(config.kv_disk),
        debug_dump=_absolute(config.debug_dump),
        record_routing_trace=_absolute(config.record_routing_trace),
        expert_heat=_absolute(config.expert_heat),
        placement_rules=_absolute(config.placement_rules),
    )


def _check_image_tokens(config: ServerConfig) -> None:
    least, most = config.image_min_tokens, config.image_max_tokens
    if least is not None and most is not None and least > most:
        raise ConfigError(f"--image-min-tokens: {least} is more than --image-max-tokens {most}; lower it")


def find_tower(mmproj: str | None, model: Path) -> str | None:
    """Returns --mmproj as a path. "auto": the only mmproj file beside the model, or the folder whose config.json has a
    vision tower. Raises FileError if there is no such file or tower, or several; ModelError if the folder's config.json
    cannot be read."""
    if mmproj is None:
        return None
    # Imported here, because the readers of folders import numpy, which the launcher does not need.
    from moeserve.models.sources.huggingface import has_tower, is_hugging_face_folder

    if mmproj != "auto":
        path = _absolute(mmproj)
        assert path is not None
        if not os.path.isfile(path) and not is_hugging_face_folder(Path(path)):
            raise FileError(f"--mmproj: there is no file {path}; name one, or leave it out")
        return path
    folder = model if model.is_dir() else model.parent
    found = sorted(file for file in folder.glob("*.gguf") if is_tower_file(file.name))
    if not found and is_hugging_face_folder(folder):
        if has_tower(folder):
            return str(folder)
        raise FileError(f"--mmproj auto: {folder.name} has no vision tower (vision_config); leave it out")
    if not found:
        raise FileError(f"--mmproj auto: there is no *mmproj*.gguf in {folder}; name the file")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise FileError(f"--mmproj auto: {folder} has several, {names}; name one")
    return str(found[0])


def _prefix_cache(config: ServerConfig) -> str:
    """Returns the value of --prefix-cache, with "auto" replaced: tenants with keys of their own get separate caches, so
    that `cached_tokens` does not reveal one tenant's prompts to another."""
    if config.prefix_cache != "auto":
        return config.prefix_cache
    return "per-key" if config.api_key or config.api_key_file else "shared"


def _absolute(path: str | None) -> str | None:
    return path and os.path.abspath(Path(path).expanduser())


def demonstration_model() -> Path:
    """Returns the path of the small model in the package, which is served if the user names none."""
    return Path(str(importlib.resources.files("moeserve") / "assets" / DEMONSTRATION_MODEL))


def _find(text: str, source: str = MODEL_SOURCE) -> tuple[Path, str]:
    """Returns the model's path and its name in the API: the file or folder at the path `text`, else the hub's model of
    that name. source: the flag, for messages."""
    path = Path(text).expanduser()
    name = None if os.path.exists(path) else name_of(text)
    if name is None:
        return _local(path, source)
    from moeserve.hub.download import fetch  # only who asks for it needs the hub's library

    return fetch(name), str(name)


def _local(model: Path, source: str = MODEL_SOURCE) -> tuple[Path, str]:
    """Checks a local path by a look at the file system, so that errors appear at once, before any process starts."""
    path = Path(os.path.abspath(model))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileError(f"{source}: there is no {path}{model_hints.for_missing(path)}") from None
    except OSError as error:  # a folder of the path may not be entered
        who = f" by user {os.geteuid()}" if isinstance(error, PermissionError) else ""
        raise FileError(f"{source}: {path} cannot be reached{who}: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        raise FileError(
            f"{source}: user {os.geteuid()} has no right to read {path}; chmod it, or run as its owner"
        )
    if not path.is_dir():
        _check_file(path, source)
        return path, _name_of(path)
    models, has_config = (
        models_of(file.name for file in path.glob("*.gguf")),
        os.path.exists(path / "config.json"),
    )
    if not models and not has_config:
        hint = model_hints.for_folder(path)
        raise FileError(f"{source}: neither a .gguf file nor a config.json in the folder {path}{hint}")
    if len(models) > 1 and not has_config:
        raise FileError(
            f"{source}: {path}: the folder holds {len(models)} models; name one of them: {listed(models)}"
        )
    if models and not has_config:
        _check_file(path / models[0], source)
    return path, _name_of(Path(models[0])) if models else path.name


def _check_file(file: Path, source: str) -> None:
    """Raises FileError for a file that is no GGUF file, or a part of one. A FIFO is not opened; the model's reader
    reports it."""
    if not file.is_file():
        return
    if problem := what_instead_of_gguf(file):
        raise FileError(f"{source}: {file}: this is not a GGUF file {problem}")
    if problem := model_hints.unfinished(file):
        raise FileError(f"{source}: {file}: {problem}")


def _name_of(file: Path) -> str:
    """Returns the name without .gguf and -00001-of-0000N."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file.name)

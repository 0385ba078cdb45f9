"""Which machine each flag belongs to if the worker is on another machine."""

from __future__ import annotations

import dataclasses
from typing import Final

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.remote.tls_files import TlsFiles

ENGINE_GROUPS: Final = ("Device", "CPU engine", "GPU")  # groups of `--help` whose flags only the worker reads
ENGINE_OPTIONS: Final = (
    "max_model_len",
    "load_format",
    "speculative_config",
    "speculative_model",
    "max_num_seqs",
    "max_total_tokens",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "kv_ram",
    "kv_disk",
    "kv_disk_gib",
    "kv_window_ratio",
    "state_snapshot_budget",
    "debug_dump",
    "debug_dump_steps",
    "record_routing_trace",
    "record_routing_tokens",
)
BOTH: Final = ("model", "lora_modules", "log_level", "log_format", "step_timeout", "max_engine_crashes")
TLS_OPTIONS: Final = ("worker_ssl_certfile", "worker_ssl_keyfile", "worker_ssl_ca_certs")


def worker_options() -> tuple[str, ...]:
    """Returns the server's options that `moeserve worker` also has."""
    return tuple(
        option.name
        for option in dataclasses.fields(ServerConfig)
        if option.metadata["group"] in ENGINE_GROUPS or option.name in (*ENGINE_OPTIONS, *BOTH)
    )


def check_server(config: ServerConfig) -> None:
    """Checks the given options, before defaults are filled in. Raises ConfigError for a flag that would have no
    effect, and for certificates that are missing."""
    if config.worker is None:
        for name in TLS_OPTIONS:
            if getattr(config, name) is not None:
                raise ConfigError(f"{_flag(name)}: has no effect without --worker; leave it out")
        return
    parse_address(config.worker, "--worker")
    if config.lora_modules:
        raise ConfigError(
            "--lora-modules: cannot be combined with --worker, on whose machine the adapters would have to be; leave "
            "it out"
        )
    if config.lora_dir is not None:
        raise ConfigError(
            "--lora-dir: cannot be combined with --worker, on whose machine the adapters would have to be; leave it out"
        )
    for name in ("worker_ssl_certfile", "worker_ssl_ca_certs"):
        if getattr(config, name) is None:
            raise ConfigError(f"--worker: needs {_flag(name)}; give it, as both sides must have certificates")
    for option in dataclasses.fields(ServerConfig):
        is_workers = option.name in worker_options() and option.name not in BOTH
        if is_workers and getattr(config, option.name) != option.default:
            raise ConfigError(
                f"{_flag(option.name)}: belongs to the worker's machine if --worker is given; "
                "give it to `moeserve worker`"
            )


def tls_files(config: ServerConfig) -> TlsFiles:
    """The TLS files of a server with `worker`."""
    assert config.worker_ssl_certfile is not None
    assert config.worker_ssl_ca_certs is not None
    return TlsFiles(config.worker_ssl_certfile, config.worker_ssl_keyfile, config.worker_ssl_ca_certs)


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Parses HOST:PORT; an IPv6 address is in brackets. Raises ConfigError for a text of another form."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag}: must be HOST:PORT (an IPv6 address in brackets), not {text!r}")
    return host, int(port)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

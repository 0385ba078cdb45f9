"""The options of a server with several models (`moeserve.front`)."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config.option import option


@dataclass(frozen=True, slots=True)
class SeveralModelsConfig:
    """The options that say which models one server loads and unloads, and the memory that they share."""

    models_file: str | None = option(
        None,
        "Several models",
        "YAML or JSON file that lists models to serve, in addition to those of the command line. Each entry has "
        "the key model; pin (true: load it at the start and never unload it) if needed; and the flags for this "
        "model alone, without their dashes (default: none)",
        metavar="PATH",
    )
    models_memory: float | None = option(
        None,
        "Several models",
        "RAM that the whole server may take, as `moeserve plan` estimates it; to load a model that does not "
        "fit, others are unloaded. Lower it to leave RAM to other programs (default: the RAM that is free "
        "at the start, less 5%)",
        low=0.1,
        high=1e6,
        metavar="GIB",
    )
    model_idle_timeout: float | None = option(
        None,
        "Several models",
        "unload a model that has had no request for this many seconds, so that other programs can use its "
        "memory; Ollama's keep_alive in a request overrides it (default: never)",
        low=0,
        high=1e9,
    )
    model_load_timeout: float | None = option(
        None,
        "Several models",
        "maximum seconds that a request waits for its model to be loaded; then it gets a 503. Raise it for "
        "large models on slow disks (default: 300)",
        low=0.1,
        high=86400,
    )

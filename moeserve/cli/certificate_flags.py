"""Checks the flags that name the files for HTTPS."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError

_KEY: Final = b"PRIVATE KEY-----"


def check_certificate(config: ServerConfig) -> None:
    """Raises ConfigError if one of the two flags is given without the other. The files are read later."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile: needs --ssl-certfile, the key's certificate; add it")
        return
    if config.ssl_keyfile is not None:
        return
    try:
        has_key = _KEY in Path(config.ssl_certfile).expanduser().read_bytes()
    except OSError:
        return  # the server reports a file that cannot be read
    if not has_key:
        raise ConfigError(
            "--ssl-certfile: needs --ssl-keyfile, because the certificate's file has no private key; add it"
        )

"""The files of mutual TLS."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end."""

    certfile: str
    keyfile: str | None  # None: the key is in the certificate's file
    ca_certs: str

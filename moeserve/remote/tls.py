"""Mutual TLS: each end has a certificate, and the certificate of an authority that must have signed the other end's."""

from __future__ import annotations

import ssl

from moeserve.errors import ConfigError
from moeserve.remote.tls_files import TlsFiles


def gate_context(files: TlsFiles, flag_prefix: str) -> ssl.SSLContext:
    """Returns the TLS context of the listening end: the handshake fails for a client without a certificate signed by
    the authority. Raises ConfigError, which names the flags."""
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files, flag_prefix)


def link_context(files: TlsFiles, flag_prefix: str) -> ssl.SSLContext:
    """Returns the TLS context of the connecting end: it also checks that the peer's certificate is for the called name
    or address. Raises ConfigError, which names the flags."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = True
    return _load(context, files, flag_prefix)


def _load(context: ssl.SSLContext, files: TlsFiles, flag_prefix: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if context.protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection shows its certificate anew
    flag = f"{flag_prefix}ca-certs"
    path = files.ca_certs
    try:
        context.load_verify_locations(files.ca_certs)
        flag, path = f"{flag_prefix}certfile, {flag_prefix}keyfile", files.certfile
        context.load_cert_chain(files.certfile, files.keyfile, _no_password)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"{flag}: {path} cannot be used: {error.strerror or error}; name a PEM file that the server may read"
        ) from error
    return context


def _no_password() -> str:
    """Raises instead of asking for a password on the terminal."""
    raise ConfigError(
        "the private key has a password; use a key without one, in a file that only you may read"
    )

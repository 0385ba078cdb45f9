"""The defence against DNS rebinding: a check of the Host header.

A malicious site can make its own name resolve to 127.0.0.1 after its page was loaded. For the browser, the page's
scripts and the visitor's local server then have the same origin, so the scripts could use the server. But their
requests' Host header still has the site's name. So a server on a loopback address without API keys answers only to
names that cannot exist on the public internet, and to the names of --allowed-host.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError, shown
from moeserve.httpserver.transport.refuse import refuse

# Domains that the public DNS never has (RFC 6761, RFC 6762, ICANN's decision of 2024).
_PRIVATE_DOMAINS: Final = (".localhost", ".local", ".internal")


class KnownHost:
    """Answers 403 to a request whose Host header is not a name of this server."""

    def __init__(self, app: ASGIApp, apis: ApiTable, allowed: Iterable[str]) -> None:
        self.app = app
        self._apis = apis
        self._allowed = frozenset(name.lower() for name in (*allowed, socket.gethostname()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._is_ours(host):
            await self.app(scope, receive, send)
            return
        message = (
            f"the Host header says {shown(host)}, which is not known as a name of this server; start it with "
            "--allowed-host and this name, or with an --api-key"
        )
        await refuse(scope, send, self._apis, ApiError(403, message, code="unknown_host"))

    def _is_ours(self, host: str) -> bool:
        name = name_of(host)
        return name in self._allowed or is_private(name)


def name_of(host: str) -> str:
    """Returns the Host header without its port, in lower case."""
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def is_private(name: str) -> bool:
    """Returns whether `name` cannot be in the public DNS: it is an address, has no dot, or is in a private domain."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        name = name.removesuffix(".")
        return "." not in name or name.endswith(_PRIVATE_DOMAINS)
    return True


def is_loopback(host: str) -> bool:
    """Returns whether a server on --host `host` can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

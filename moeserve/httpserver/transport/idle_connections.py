"""The connections without a request. Each client address has a bound on them, so that no client can keep others out.
When the server is full, this module chooses the kept-alive connections to close."""

from __future__ import annotations

import ipaddress
from abc import abstractmethod
from functools import lru_cache
from typing import Protocol


class Idle(Protocol):
    @abstractmethod
    def close_idle(self) -> None: ...


class IdleConnections:
    """The idle connections of each address, the longest-waiting first. If an address has more than `most`, its first
    connection is closed: a client that opens many connections displaces its own ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, dict[Idle, None]] = {}
        self._kept_alive: dict[
            Idle, None
        ] = {}  # kept-alive connections of all addresses, the longest-waiting first

    def add(self, address: str | None, connection: Idle, *, is_kept_alive: bool = False) -> None:
        """Adds a connection. address: None for a Unix socket, which has no bound. is_kept_alive: it has had an
        answer."""
        if is_kept_alive:
            self._kept_alive[connection] = None
        if address is None:
            return
        waiting = self._waiting.setdefault(network_of(address), {})
        waiting[connection] = None
        if len(waiting) > self._most:
            longest = next(iter(waiting))
            del waiting[longest]
            self._kept_alive.pop(longest, None)
            longest.close_idle()

    def close_kept_alive(self) -> bool:
        """Closes the kept-alive connection that has waited longest. Returns False if there is none."""
        longest = next(iter(self._kept_alive), None)
        if longest is None:
            return False
        del self._kept_alive[longest]
        longest.close_idle()
        return True

    def begin_request(self, connection: Idle) -> None:
        """Notes that a request's first bytes have come: the connection is no longer closed to make room."""
        self._kept_alive.pop(connection, None)

    def remove(self, address: str | None, connection: Idle) -> None:
        """Removes a connection that has a request or is closed. An unknown connection is no error."""
        self._kept_alive.pop(connection, None)
        if address is None:
            return
        network = network_of(address)
        waiting = self._waiting.get(network, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(network, None)


@lru_cache(1024)
def network_of(address: str) -> str:
    """Returns an IPv4 address unchanged, and the /64 network of an IPv6 address: one client may own all of it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))

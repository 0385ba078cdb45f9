"""A bound on the connections of one client address that wait for a request, so that no client keeps others out."""

from __future__ import annotations

import ipaddress
from abc import abstractmethod
from typing import Protocol


class Idle(Protocol):
    @abstractmethod
    def close_idle(self) -> None: ...


class IdleConnections:
    """Of each address those without a request, the one that has waited longest first. One more than `most` closes that
    one: a client that opens many and sends nothing then displaces its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, dict[Idle, None]] = {}

    def add(self, address: str, connection: Idle) -> None:
        waiting = self._waiting.setdefault(network_of(address), {})
        waiting[connection] = None
        if len(waiting) > self._most:
            longest = next(iter(waiting))
            del waiting[longest]
            longest.close_idle()

    def remove(self, address: str, connection: Idle) -> None:
        """It has a request, or is closed. One that is not there is no error."""
        network = network_of(address)
        waiting = self._waiting.get(network, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(network, None)


def network_of(address: str) -> str:
    """An IPv4 address, or the /64 network of an IPv6 address, all of which one client may have."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))

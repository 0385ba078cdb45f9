"""Downloads pictures and videos from URLs that clients send, only from hosts that the operator allows.

A URL makes the server connect to a host that the client chose (SSRF). So the host must be listed in
`--allowed-media-domains`, and all its addresses must be public. A name that resolves to a private address is refused,
and the connection goes to one of the checked addresses. Each redirect is checked like the first URL.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from moeserve.httpserver.transport.errors import invalid
from moeserve.messages.pictures import MAX_PICTURE_BYTES

MOST_SECONDS: Final = 20.0  # for one picture, including redirects
MOST_REDIRECTS: Final = 3
MOST_AT_ONCE: Final = 16
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_NAT64: Final = 0x64FF9B << 96  # 64:ff9b::/96: the last 32 bits are an IPv4 address (RFC 6052)
_HEADERS: Final = {"accept": "image/*, video/*", "accept-encoding": "identity", "user-agent": "moeserve"}

log = logging.getLogger(__name__)

Address = IPv4Address | IPv6Address


class _NotPublic(OSError):
    """A host has an address that is not public."""


class _Refused(Exception):
    """A picture is refused. The message completes "the picture ..." for the client."""


def is_public(address: Address) -> bool:
    """Returns False for private, loopback and multicast addresses."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if int(address) >> 32 << 32 == _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner:
            return is_public(inner)
    is_site_local = isinstance(address, IPv6Address) and address.is_site_local
    return address.is_global and not address.is_multicast and not is_site_local


class PictureFetcher:
    """Downloads pictures and videos for one event loop."""

    def __init__(self, domains: tuple[str, ...], allows: Callable[[Address], bool] = is_public) -> None:
        """domains: allowed host names, without their subdomains. allows: whether an address may be connected to."""
        self._domains = frozenset(name.lower().rstrip(".") for name in domains)
        self._allows = allows
        self._room = asyncio.Semaphore(MOST_AT_ONCE)

    async def fetch(self, url: str, param: str, what: str = "picture") -> bytes:
        """Returns the file's bytes. what: "picture" or "video", for messages. Raises ApiError with status 400 if the
        host is not allowed, does not answer in time, or sends no file of the allowed size."""
        if not self._domains:
            example = "image/png" if what == "picture" else "video/mp4"
            message = f"{what}s are not fetched from addresses: send the {what} itself, as data:{example};base64,..."
            raise invalid(param, message)
        try:
            async with self._room, asyncio.timeout(MOST_SECONDS):
                return await self._fetch(url)
        except _Refused as error:
            raise invalid(param, f"the {what} {error}") from error
        except TimeoutError as error:
            raise invalid(param, f"the {what} did not arrive within {MOST_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            log.info("a %s was not fetched: %s", what, error)
            raise invalid(param, f"the {what} could not be fetched: its host does not answer") from error

    async def _fetch(self, url: str) -> bytes:
        """Returns the file's bytes. Raises _Refused and aiohttp's errors."""
        connector = aiohttp.TCPConnector(resolver=_Resolver(self._allows), use_dns_cache=False)
        async with aiohttp.ClientSession(
            connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), headers=_HEADERS
        ) as session:
            where = self._checked(url)
            for _ in range(MOST_REDIRECTS + 1):
                async with session.get(where, allow_redirects=False) as answer:
                    if answer.status in _REDIRECTS and "location" in answer.headers:
                        where = self._checked(str(where.join(URL(answer.headers["location"]))))
                        continue
                    if answer.status != 200:
                        raise _Refused(
                            f"could not be fetched: its host answers {answer.status}; send a URL that "
                            "needs no sign-in, or the picture as a data: URL"
                        )
                    return await _bounded(answer)
        raise _Refused(
            f"could not be fetched: there are more than {MOST_REDIRECTS} redirects; send the URL that they "
            "lead to"
        )

    def _checked(self, text: str) -> URL:
        """Raises _Refused, ValueError."""
        url = URL(text)
        host = (url.raw_host or "").lower().rstrip(".")
        if url.scheme not in ("http", "https") or url.user is not None or url.password is not None:
            raise _Refused(
                "has an address that is not supported; use http:// or https://, without a user name"
            )
        if host not in self._domains:
            raise _Refused(
                f"has an address of {host[:100]!r}, which --allowed-media-domains does not name; send the "
                "picture as a data: URL, or restart the server with that host"
            )
        try:
            address = ip_address(host)
        except ValueError:
            return url  # a host name: `_Resolver` checks its addresses
        if not self._allows(address):
            raise _Refused("has an address that is not public; send the picture as a data: URL")
        return url


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the answer's body. Raises _Refused if it has more bytes than a picture may have."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MAX_PICTURE_BYTES:
            raise _Refused(f"has more than {MAX_PICTURE_BYTES} bytes; send a smaller one")
    if not body:
        raise _Refused("is empty; send another URL")
    return bytes(body)


class _Resolver(AbstractResolver):
    """The system's resolver; it refuses a host unless all its addresses are allowed."""

    def __init__(self, allows: Callable[[Address], bool]) -> None:
        self._allows = allows
        self._system = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._system.resolve(host, port, family)
        for one in found:
            if not self._allows(ip_address(one["host"].partition("%")[0])):
                raise _NotPublic(f"{host} has the address {one['host']}, which is not public")
        return found

    async def close(self) -> None:
        await self._system.close()

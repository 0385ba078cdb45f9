"""A client of a server's chat API, for `moeserve run`."""

from __future__ import annotations

import http.client
import json
import urllib.error
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from moeserve.cli.run.events import ChatError, Event, EventReader, NoServer, error_of
from moeserve.cli.running_server import opener_of, request_of
from moeserve.errors import UserError

SILENCE_S: Final = 120.0  # our servers send a comment every 10 s
MOST_LINE_BYTES: Final = 1 << 20
MOST_ERROR_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class ChatClient:
    url: str  # without a slash at its end, and without /v1
    api_key: str | None

    def events(self, body: dict[str, Any]) -> Iterator[Event]:
        """Yields the answer's events. Closing the iterator closes the connection, and the server then stops generating.
        Raises ChatError, or its subclass NoServer if nothing listens."""
        request = request_of(f"{self.url}/v1/chat/completions", self.api_key, body)
        try:
            response = opener_of(self.url).open(request, timeout=SILENCE_S)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except urllib.error.URLError as error:
            raise NoServer(f"no server answers at {self.url} ({error.reason})") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from error
        with closing(response):
            if response.headers.get_content_type() != "text/event-stream":
                raise ChatError(
                    f"the server at {self.url} does not stream chats; check the address (--url), or "
                    "update that server"
                )
            yield from self._read(response)

    def _read(self, response: http.client.HTTPResponse) -> Iterator[Event]:
        reader = EventReader()
        while not reader.is_closed:
            try:
                line = response.readline(MOST_LINE_BYTES)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost(error) from error
            if not line:
                break
            yield from reader.events(line)
        if not reader.is_complete:
            raise self._lost(None)

    def _lost(self, cause: Exception | None) -> ChatError:
        if isinstance(cause, TimeoutError):
            return ChatError(f"the server at {self.url} has sent nothing for {SILENCE_S:.0f} s")
        why = f" ({cause})" if cause is not None and str(cause) else ""
        return ChatError(f"the connection to {self.url} was lost{why}; ask again when the server is back")

    def _refusal(self, error: urllib.error.HTTPError) -> ChatError:
        if error.code in (401, 403):
            return ChatError(
                f"the server at {self.url} needs an API key; give it with --api-key or MOESERVE_API_KEY"
            )
        if 300 <= error.code < 400:
            target = error.headers.get("location", "elsewhere")
            return ChatError(f"{self.url} redirects to {target}; name that address if you trust it")
        try:
            return error_of(json.loads(error.read(MOST_ERROR_BYTES)))
        except (OSError, http.client.HTTPException, ValueError):
            return ChatError(f"{self.url} answers with HTTP status {error.code}; is it the right address?")


def address_of(text: str) -> str:
    """Returns --url without `/v1` and slashes at its end. Raises UserError if it is not a server's address, or contains
    a user, a query or a fragment."""
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise UserError(f"--url: must be an address as http://HOST:PORT or https://HOST, not {text!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError("--url: takes no user, query or fragment; a key is given by --api-key")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}".rstrip("/")

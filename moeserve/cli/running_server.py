"""Asks the server at an address, for the commands that use a running server."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from moeserve.config import ServerConfig
from moeserve.errors import UserError

MOST_ANSWER_BYTES: Final = 16 << 20
ANSWER_S: Final = 5.0  # time for an answer that does not need the model


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an HTTPError, because the API key would be sent to the redirect's target."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
_BY_ENVIRONMENT: Final = urllib.request.build_opener(_NoRedirects())


class ServerGone(UserError):
    """Raised if no server listens at the address."""


class NotOurServer(UserError):
    """Another program listens there."""


class ServedModel(NamedTuple):
    name: str
    context_length: int | None  # tokens; None while the model is being loaded
    sees_pictures: bool = False


def url_of(config: ServerConfig) -> str:
    """Returns the address at which clients on this machine reach a server with this configuration, without a slash at
    its end."""
    scheme = "http" if config.ssl_certfile is None else "https"
    host = config.host
    try:
        if (address := ipaddress.ip_address(host)).is_unspecified:  # it listens on all addresses
            host = "::1" if address.version == 6 else "127.0.0.1"
    except ValueError:
        pass
    return f"{scheme}://[{host}]:{config.port}" if ":" in host else f"{scheme}://{host}:{config.port}"


def opener_of(url: str) -> urllib.request.OpenerDirector:
    """Returns an opener for URLs of the server at `url`: direct if that is this machine or a private network, else
    through the environment's proxy. It does not follow redirects."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
        is_near = address.is_loopback or address.is_private or address.is_link_local
    except ValueError:
        is_near = host == "localhost" or host.endswith(".localhost")
    return _DIRECT if is_near else _BY_ENVIRONMENT


def models_at(url: str, api_key: str | None, *, any_owner: bool = False) -> list[ServedModel]:
    """Returns the models that a moeserve server at `url` serves. any_owner: accept other servers too, such as a gateway
    in front of moeserve. Raises ServerGone, NotOurServer, or another UserError if the server wants a key."""
    answer = ask(url, "/v1/models", api_key)
    try:
        found = json.loads(answer)["data"]
        models = [_served(one) for one in found if any_owner or one["owned_by"] == "moeserve"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotOurServer(
            f"the program that answers at {url} is not moeserve; choose another --port"
        ) from error
    if not models:
        raise NotOurServer(f"the server at {url} is not moeserve; choose another --port")
    return models


def _served(card: dict[str, Any]) -> ServedModel:
    name, context = card["id"], card.get("context_length")
    if not isinstance(name, str):
        raise TypeError(name)
    sees = "image" in ((card.get("architecture") or {}).get("input_modalities") or ())
    return ServedModel(name, context if isinstance(context, int) else None, sees)


def ask(url: str, path: str, api_key: str | None) -> bytes:
    """Returns the body of GET `path`. Raises the errors of `models_at`."""
    try:
        with opener_of(url).open(request_of(url + path, api_key), timeout=ANSWER_S) as response:
            return bytes(response.read(MOST_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (401, 403):
                raise UserError(
                    f"the server at {url} needs an API key; give it with --api-key or MOESERVE_API_KEY"
                ) from error
            raise NotOurServer(
                f"the program that answers at {url} is not moeserve; choose another --port"
            ) from error
    except urllib.error.URLError as error:
        raise ServerGone(
            f"no server answers at {url} ({error.reason}); start one: moeserve --model MODEL"
        ) from error
    except (OSError, ValueError) as error:  # the server closed the connection, or speaks another protocol
        raise NotOurServer(
            f"the program that listens at {url} is not moeserve; choose another --port"
        ) from error


def request_of(url: str, api_key: str | None, body: Any = None) -> urllib.request.Request:
    """Returns a POST of `body` as JSON, or a GET without a body. Raises UserError for a key that HTTP cannot send."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise UserError(
                "--api-key: has a line break, or characters that are not ASCII, which HTTP cannot send; correct it"
            )
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, data, headers)

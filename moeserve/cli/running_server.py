"""The server that runs at an address, as the commands that use one see it."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from typing import Any, Final, NamedTuple

from moeserve.config import ServerConfig
from moeserve.errors import UserError

ANSWER_S: Final = 5.0  # within which a server answers what it knows without its model
# A proxy of the environment is for other hosts.
DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerGone(UserError):
    """No server listens there."""


class NotOurServer(UserError):
    """Another program listens there."""


class ServedModel(NamedTuple):
    name: str
    context_length: int | None  # tokens; None while the model is being loaded


def url_of(config: ServerConfig) -> str:
    """The address at which clients on this machine reach a server of `config`, without a slash at its end."""
    scheme = "http" if config.ssl_certfile is None else "https"
    host = config.host
    try:
        if (address := ipaddress.ip_address(host)).is_unspecified:  # it listens on all addresses
            host = "::1" if address.version == 6 else "127.0.0.1"
    except ValueError:
        pass
    return f"{scheme}://[{host}]:{config.port}" if ":" in host else f"{scheme}://{host}:{config.port}"


def models_at(url: str, api_key: str | None) -> list[ServedModel]:
    """What a server of ours at `url` serves. Raises ServerGone, NotOurServer, or another UserError
    where it wants a key."""
    answer = ask(url, "/v1/models", api_key)
    try:
        found = json.loads(answer)["data"]
        ours = [one for one in found if one["owned_by"] == "moeserve"]
        models = [ServedModel(one["id"], one["context_length"]) for one in ours]
    except (ValueError, KeyError, TypeError) as error:
        raise NotOurServer(f"what answers at {url} is no moeserve; choose another --port") from error
    if not models:
        raise NotOurServer(f"the server at {url} is no moeserve; choose another --port")
    return models


def ask(url: str, path: str, api_key: str | None) -> bytes:
    """The body of GET `path`. Raises as `models_at`."""
    try:
        with DIRECT.open(request_of(url + path, api_key), timeout=ANSWER_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (401, 403):
                raise UserError(
                    f"the server at {url} wants an API key: --api-key or MOESERVE_API_KEY"
                ) from error
            raise NotOurServer(f"what answers at {url} is no moeserve; choose another --port") from error
    except urllib.error.URLError as error:
        raise ServerGone(
            f"no server answers at {url} ({error.reason}); start one: moeserve --model MODEL"
        ) from error
    except (OSError, ValueError) as error:  # it closed the connection, or speaks another protocol
        raise NotOurServer(f"what listens at {url} is no moeserve; choose another --port") from error


def request_of(url: str, api_key: str | None, body: Any = None) -> urllib.request.Request:
    """A POST of `body` as JSON, or a GET without one."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, data, headers)
